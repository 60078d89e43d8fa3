"""Real configurations of vLLM, and no engine. Run by .venv-engine's interpreter; elsewhere nothing is collected."""

import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from connector.memory_tier import MemoryTier
from e2e.vllm_model import HEADS, KV_HEADS, LAYERS, WIDTH, planned, write_model
from tiertune_connector.serve.main import StoreProcess
from tiertune_connector.settings import StoreSettings

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

BLOCK, CHUNK = 32, 64
NAME = {"served_model_name": "llama"}
PATIENCE_S = 20.0
LAYOUT = "LBHNC"
"""What vLLM resolves for the offloading connector."""


@pytest.fixture(autouse=True)
def listen(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], None]]:
    """To vLLM's logger, which keeps to itself what pytest would capture; anew after vLLM has set it up anew."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield lambda: logger.addHandler(caplog.handler)
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def model() -> Iterator[Path]:
    """A tiny Llama on disk."""
    with tempfile.TemporaryDirectory(prefix="tt-model-") as folder:
        yield write_model(Path(folder) / "llama")


@pytest.fixture
def configured(model: Path, listen: Callable[[], None]) -> Callable[..., Any]:
    """Makes the VllmConfig of an engine with TierTune: ``extra`` are TierTune's own settings, the rest EngineArgs'."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    def make(
        *, extra: dict[str, Any] | None = None, engine_id: str = "engine-0", role: Any = "kv_both", **arguments: Any
    ) -> Any:
        settings = {"socket": "/run/tiertune/store.sock", "staging": "32MiB", "chunk_tokens": 64, "store_dram": 0}
        transfer = KVTransferConfig(
            kv_connector="TierTuneConnector",
            kv_role=role,
            engine_id=engine_id,
            kv_connector_extra_config=settings if extra is None else extra,
        )
        usual = {
            "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK,
            "max_model_len": 2048, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20,
            "kv_transfer_config": transfer,
        }  # fmt: skip
        config = EngineArgs(**(usual | arguments)).create_engine_config()
        config.cache_config.kv_cache_layout = LAYOUT
        listen()
        return config

    return make


def full_attention(**fields: Any) -> Any:
    """The tiny Llama's kind of layer."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    usual = {"block_size": BLOCK, "num_kv_heads": KV_HEADS, "head_size": WIDTH // HEADS, "dtype": torch.float32}
    return FullAttentionSpec(**(usual | fields))


def cache_of(config: Any, layers: dict[str, Any] | None = None) -> Any:
    """The scheduler's KVCacheConfig, as vLLM's engine core makes it of the workers' layers."""
    block = config.cache_config.block_size
    layers = layers or {f"model.layers.{index}.attn": full_attention(block_size=block) for index in range(LAYERS)}
    return planned(config, layers, 64 << 20)


def identify(config: Any, cache: Any = None) -> Any:
    """The namespace of an engine."""
    from tiertune_connector.vllm.compat import Engine
    from tiertune_connector.vllm.identity import namespace

    cache = cache or cache_of(config)
    engine = Engine(config, cache)
    return namespace(config, cache, engine.config, engine.groups[0].chunk_tokens, engine.settings.epoch)


@pytest.fixture
def told(configured: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the namespace of an engine whose configuration has become another once its cache was made.

    Fields are named by their path, dots written ``__``; ``of`` are EngineArgs'.
    """

    def made(of: Any = None, **fields: Any) -> Any:
        config = configured(**(NAME | (of or {})))
        cache = cache_of(config)
        for path, value in fields.items():
            *parents, last = path.split("__")
            setattr(reduce(getattr, parents, config), last, value)
        return identify(config, cache)

    return made


@pytest.fixture
def usual(told: Callable[..., Any]) -> Any:
    return told()


@pytest.fixture
def home() -> Iterator[Path]:
    """Short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="tt-") as folder:
        yield Path(folder)


@pytest.fixture
def remote() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def store(home: Path, remote: MemoryTier) -> Iterator[StoreProcess]:
    settings = StoreSettings.model_validate(
        {
            "name": "host-a",
            "socket": home / "s.sock",
            "state_dir": home / "state",
            "http": {"port": 0},
            "dram": {"capacity": "64MiB", "segment": "16MiB"},
            "remote": {"url": f"file://{home}/remote", "timeout": PATIENCE_S, "probe_every": 3600},
        }
    )
    process = StoreProcess(settings, wrap_remote=lambda _: remote)
    process.start()
    yield process
    process.stop()


def on(store: StoreProcess, **more: Any) -> dict[str, Any]:
    """TierTune's own settings of an engine on a store."""
    patient = ("connect_timeout", "lookup_deadline", "load_deadline", "load_deadline_floor", "store_deadline")
    usual = {"socket": str(store.server.path), "staging": "32MiB", "chunk_tokens": CHUNK, "store_dram": 0}
    return usual | dict.fromkeys(patient, "20s") | more


@pytest.fixture
def engines(configured: Callable[..., Any], store: StoreProcess) -> Iterator[Callable[..., Any]]:
    """Makes engines on the store; all end with the test."""
    from engine.scheduler import Engine

    made: list[Engine] = []

    def make(
        *, layers: Any = None, engine_id: str | None = None, arguments: Any = None, multimodal: Any = None, **extra: Any
    ) -> Engine:
        config = configured(
            extra=on(store, **extra), engine_id=engine_id or f"tt-test-{len(made)}", **(arguments or {})
        )
        config.model_config.multimodal_config = multimodal
        made.append(Engine(config, cache_of(config, layers() if layers else None)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def prompt(engines: Callable[..., Any]) -> list[int]:
    """Of four chunks and a part of one, which the store has from an engine that computed them."""
    from engine.scheduler import tokens

    prompt = tokens(300)
    engines().computes("a", prompt)
    return prompt


@pytest.fixture
def engine(engines: Callable[..., Any]) -> Any:
    """On the store, with settings as usual."""
    return engines()
