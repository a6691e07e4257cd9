"""Names of keys: no job and no host can reach another's, whatever they are called."""

from hypothesis import given
from hypothesis import strategies as st

from frun.protocol.keys import ROOT, Keys

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(names, names)
def test_no_job_is_inside_another(one: str, other: str) -> None:
    """The prefix of one job never begins the prefix of another."""
    if one != other:
        assert not Keys(one).prefix.startswith(Keys(other).prefix)


@given(names, names, names)
def test_hosts_have_keys_of_their_own(job: str, one: str, other: str) -> None:
    """Two hosts differ in every key, and all keys lie under the job's prefix."""
    keys = Keys(job)
    assert (keys.host(one) == keys.host(other)) == (one == other)
    assert (keys.report(one) == keys.report(other)) == (one == other)
    mine = {keys.spec, keys.leader, keys.ranktable, keys.host(one), keys.report(one)}
    mine.add(keys.node_rank(3))
    assert len(mine) == 6
    assert all(key.startswith(keys.prefix) for key in mine)
    assert keys.host(one).startswith(keys.hosts)
    assert keys.report(one).startswith(keys.reports)


def test_readable() -> None:
    """Ordinary names appear as they are, so that `etcdctl get --prefix` can be typed."""
    assert Keys("job-7").host("node1-a1b2c3") == f"{ROOT}job-7/hosts/node1-a1b2c3"
