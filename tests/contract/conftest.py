"""What fails in the contract of tiers tells its values, as in a test's own module."""

import pytest

pytest.register_assert_rewrite("contract.tier_contract")
