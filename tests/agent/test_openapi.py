"""What the API's own description allows is sent to it: nothing makes it fail."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
HOST = {"Host": "127.0.0.1"}


@pytest.mark.slow
def test_no_call_makes_the_agent_fail(agent):
    """Every path with generated parameters and bodies, right and wrong: an answer as described, never a 5xx."""
    agent.loop.run_once()
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", agent.served, headers=HOST)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 18
    for operation in operations:

        @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def answered(case):
            case.call_and_validate(checks=CHECKS, headers=HOST)

        answered()
