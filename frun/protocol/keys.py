"""Names of the keys in etcd. One job can never reach another's keys, whatever its id is."""

from dataclasses import dataclass
from functools import cache
from urllib.parse import quote

ROOT = "/frun/"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job. Job ids and host ids are percent-quoted, so `a` and `a/b` never meet."""

    job_id: str

    @property
    def prefix(self) -> str:
        """Everything of this job is under here."""
        return _prefix(self.job_id)

    @property
    def spec(self) -> str:
        """The job's specification, create-only."""
        return self.prefix + "spec"

    @property
    def leader(self) -> str:
        """The elected agent; its create revision is the fencing token."""
        return self.prefix + "leader"

    @property
    def ranktable(self) -> str:
        """The world as last decided."""
        return self.prefix + "ranktable"

    @property
    def news(self) -> str:
        """How the rank table changed last: what every host watches."""
        return self.prefix + "news"

    @property
    def arrival(self) -> str:
        """Written by every host that registers, so that a founder sees that it is not the first."""
        return self.prefix + "arrival"

    @property
    def hosts(self) -> str:
        """Prefix of the hosts' records."""
        return self.prefix + "hosts/"

    @property
    def reports(self) -> str:
        """Prefix of the hosts' reports."""
        return self.prefix + "reports/"

    @property
    def incidents(self) -> str:
        """Prefix of the closed incidents."""
        return self.prefix + "incidents/"

    def incident(self, number: int) -> str:
        """Key of one incident; the digits keep the order of the keys that of time."""
        return f"{self.incidents}{number:08d}"

    @property
    def commands(self) -> str:
        """Prefix of what operators ask for."""
        return self.prefix + "commands/"

    def command(self, number: int) -> str:
        """Key of one command; the digits keep the order of the keys that of time."""
        return f"{self.commands}{number:08d}"

    def host(self, host: str) -> str:
        """Key of one host's record."""
        return self.hosts + quote(host, safe="")

    def report(self, host: str) -> str:
        """Key of one host's report."""
        return self.reports + quote(host, safe="")

    def node_rank(self, node_rank: int) -> str:
        """Claim of an explicit --node-rank, create-only under the host's lease."""
        return f"{self.prefix}noderanks/{node_rank}"


@cache
def _prefix(job_id: str) -> str:
    """Quote a job's id once: its keys are asked for by the thousand."""
    return f"{ROOT}{quote(job_id, safe='')}/"
