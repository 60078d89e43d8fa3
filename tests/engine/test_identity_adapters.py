"""What of an engine decides what it computes with adapters."""

from tiertune_connector.vllm.identity import adapters, adapters_encode


def test_engines_that_apply_adapters_otherwise_tell_it(configured):
    """To some modules only, or in another type than the model's; how many adapters there may be does not matter."""
    lora = {"enable_lora": True, "max_lora_rank": 8}
    assert adapters(configured()) == adapters(configured(**lora)) == adapters(configured(max_loras=4, **lora)) == ""
    others = [{"lora_target_modules": ["q_proj"]}, {"lora_target_modules": []}, {"lora_dtype": "bfloat16"}]
    assert len({adapters(configured(**lora, **other)) for other in others} - {""}) == 3
    one, other = ({"lora_target_modules": names} for names in (["q_proj", "v_proj"], ["v_proj", "q_proj"]))
    assert adapters(configured(**lora, **one)) == adapters(configured(**lora, **other))


def test_adapters_of_the_vision_tower_encode_images(configured):
    lora = {"enable_lora": True, "max_lora_rank": 8}
    told = [adapters_encode(configured(**more)) for more in ({}, lora, {**lora, "enable_tower_connector_lora": True})]
    assert told == [False, False, True]
