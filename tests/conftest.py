"""What holds for every test."""

import os

from hypothesis import settings

# A busy machine is no finding. On a build server a run must say the same of the same code: new examples are searched
# for at a developer's.
settings.register_profile("tests", deadline=None)
settings.register_profile("build server", deadline=None, derandomize=True)
settings.load_profile("build server" if os.environ.get("CI") else "tests")
