"""Which failure is the cause and which are its victims.

When a rank dies its peers' collectives break, and they fail too: often with a recorded exception, while
the dead rank could record nothing. The earliest *recorded* time would blame a victim. The order here uses
what the failures are, then the order in which they were seen; no two hosts' clocks are compared.
"""

import re
from collections.abc import Iterable, Sequence

from frun.protocol.records import Failure

# What c10d, gloo, NCCL and HCCL say when a peer has gone. Lower case.
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused|aborted|timed out)|broken pipe|closed by peer|socket (closed|timeout)"
    r"|connectfullmesh|peer (has )?(closed|gone|exited)|remote (process|peer|side)|ncclremoteerror"
    r"|nccl communicator was aborted|distbackenderror|distnetworkerror|the group store|generationended"
    r"|timed out waiting for|wait timeout|hccl.*(link|timeout)"
)


def is_clear(failure: Failure) -> bool:
    """Return True when this failure can be a cause, and False when it looks like a victim's.

    A signal, or an exit status that the script chose, is clear. A recorded exception is clear unless
    it says that a peer went away. Status 1 without any record is what an uncaught exception leaves, so
    it may be either.
    """
    if failure.recorded:
        return not _PEER_LOST.search(failure.message.lower())
    return failure.exit_code != 1


def ranked(failures: Iterable[Failure]) -> list[Failure]:
    """Return failures with the most likely cause first.

    `failures` come in the order in which the leader learnt of them; within one host `order` is right.
    """
    indexed: Sequence[tuple[int, Failure]] = list(enumerate(failures))
    first_seen: dict[str, int] = {}
    for index, failure in indexed:
        first_seen.setdefault(failure.host, index)
    return [
        failure
        for _, failure in sorted(
            indexed,
            key=lambda item: (not is_clear(item[1]), first_seen[item[1].host], item[1].order),
        )
    ]
