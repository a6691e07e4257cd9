"""How properties are tried: the same examples in every run, so that a change answers for itself only.

`pytest --hypothesis-profile=explore` tries new ones, and many more.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,  # on a busy machine a step takes as long as it takes
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("same"), derandomize=False, max_examples=5000
)
settings.load_profile("same")
