"""What holds for every test."""

from hypothesis import settings

settings.register_profile("tests", deadline=None)  # a busy machine is no finding
settings.load_profile("tests")
