"""The training script of `exactness`: small, with every place where a fault can be wanted.

    python -m benchmarks.exactness_train FOLDER CONFIG     (under frun, torchrun or plain python)

CONFIG is JSON, see `Config`. Faults come from EXACTNESS_FAULTS in the words of `faults`. In FOLDER each rank
leaves `log.RANK`, one event a line: `start`, `enter`, `loss`, `done`, and `final` with a digest of
everything that was trained.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import Saboteur, parse

FOLDER = Path(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOG = os.open(FOLDER / f"log.{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
FAULTS = Saboteur(parse(os.environ.get("EXACTNESS_FAULTS", "")), FOLDER, RANK, WORLD_SIZE)


def tell(*words: object) -> None:
    """Append one line to this rank's log."""
    os.write(LOG, (" ".join(map(str, words)) + "\n").encode())


faulthandler.register(signal.SIGUSR1, all_threads=True)
tell("start", os.getpid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FAULTS.wait_for_others("loading", "ready")
FAULTS.at("loading")
FAULTS.at("loading-first")
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    FAULTS.stand_aside("loading-first")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

import frun  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WIDTH = 16
CLASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is trained."""

    steps: int = 30
    optimizer: str = "sgd"
    """`sgd` (momentum), `adamw` or `lbfgs`."""
    dropout: bool = False
    batchnorm: bool = False
    accumulate: int = 1
    loop: str = "batches"
    """`batches`: session.batches with a seed; `unseeded`: without; `plain`: from session.step."""
    update: bool = False
    """Optimizer and scheduler stand in `with session.update()`."""
    workers: int = 0
    """Processes of the DataLoader."""
    catching: bool = False
    """`except Exception: continue` stands around every step."""
    outside: bool = False
    """The objects are built, and the group is made, once and outside of the function."""


class Samples(Dataset[Batch]):
    """Numbered samples with some noise that is drawn when they are loaded."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Batch:
        if CONFIG.workers == 0:
            FAULTS.at("loader")
        draw = torch.Generator().manual_seed(index)
        inputs = torch.randn(WIDTH, generator=draw)
        noise = torch.randn(WIDTH) * 0.1 + random.random() * 0.01
        target = torch.randint(0, CLASSES, (), generator=draw)
        return torch.tensor(index), inputs + noise, target


CONFIG = Config(**json.loads(sys.argv[2]))


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer and scheduler as they are at the start of every run."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(WIDTH, 48)]
    layers += [nn.BatchNorm1d(48)] if CONFIG.batchnorm else []
    layers += [nn.ReLU()]
    layers += [nn.Dropout(0.2)] if CONFIG.dropout else []
    layers += [nn.Linear(48, 40)]
    layers += [nn.BatchNorm1d(40)] if CONFIG.batchnorm else []
    layers += [nn.Tanh(), nn.Linear(40, CLASSES)]
    model = nn.Sequential(*layers)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return model, optimizer, scheduler


def rate(step: int) -> float:
    """Return the factor of the learning rate; a place inside the scheduler's step."""
    if step > 0:
        FAULTS.at("scheduler")
    return 1 / (1 + 0.05 * step)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with the place `update` between its two groups of parameters."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if CONFIG.optimizer == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=4)
    if CONFIG.optimizer == "adamw":
        between_groups(sys.modules["torch.optim.adam"], "adam")
        return torch.optim.AdamW(groups, lr=1e-2)
    between_groups(sys.modules["torch.optim.sgd"], "sgd")
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def between_groups(module: Any, name: str) -> None:
    """Let the function that updates one group of parameters be a place once it has updated one."""
    original = getattr(module, name)
    if hasattr(original, "is_place"):
        return

    def update(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        FAULTS.at("update")

    update.is_place = True  # type: ignore[attr-defined]
    setattr(module, name, update)


def before(owner: Any, name: str, place: str, count: int = 1) -> None:
    """Let a method of a class be a place, from the `count`-th call on."""
    original = getattr(owner, name)
    calls = 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= count:
            FAULTS.at(place)
        return original(*args, **kwargs)

    setattr(owner, name, method)


def places_in_recovery() -> None:
    """Make places inside of frun where a donor and a newcomer are busy, and while groups meet."""
    from frun.worker import copy, groupstore

    before(copy.Donor, "move", "donor")
    before(copy.Receiver, "move", "newcomer")
    before(groupstore.GroupStore, "set", "meeting", count=2)


def digest(value: object, into: Any = None) -> str:
    """Return what stands for a nested state bit by bit."""
    into = hashlib.sha256() if into is None else into
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype}{tuple(value.shape)}".encode())
        into.update(
            value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    elif isinstance(value, dict):
        for key, item in value.items():
            into.update(repr(key).encode())
            digest(item, into)
    elif isinstance(value, list | tuple):
        into.update(f"[{len(value)}".encode())
        for item in value:
            digest(item, into)
    elif isinstance(value, float):
        into.update(value.hex().encode())
    else:
        into.update(repr(value).encode())
    return str(into.hexdigest()[:20])


class Training:
    """The objects of one entry and what is done in a step."""

    def __init__(
        self, session: frun.Session, made: tuple[nn.Module, torch.optim.Optimizer, Any]
    ) -> None:
        self.session = session
        self.model, self.optimizer, self.scheduler = made
        self.undo = [self.optimizer.register_step_pre_hook(lambda *_: FAULTS.at("gate")).remove]
        self.first = True
        self.last_part = False
        middle = self.model[len(self.model) // 2]  # type: ignore[index,arg-type]
        self.undo += [middle.register_forward_pre_hook(lambda *_: FAULTS.at("forward")).remove]
        weight = next(self.model.parameters())
        self.undo += [weight.register_hook(self.in_backward).remove]  # type: ignore[no-untyped-call]

    def in_backward(self, gradient: torch.Tensor) -> None:
        """Be a place when the gradients of later layers are under way already."""
        if self.last_part:
            FAULTS.at("backward")

    def wrap(self) -> None:
        """Make the replica; several small buckets once torch has rebuilt them."""
        self.replica: Any = (
            DistributedDataParallel(self.model, bucket_cap_mb=0.004)
            if dist.is_initialized()
            else self.model
        )

    def step(self, batches: list[Batch]) -> None:
        """Do one update."""
        number = FAULTS.step
        evaluation = 0

        def compute() -> torch.Tensor:
            nonlocal evaluation
            if evaluation == 1:
                FAULTS.at("update")
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for part, (indices, inputs, targets) in enumerate(batches):
                self.last_part = part == len(batches) - 1
                skip = not self.last_part and isinstance(self.replica, DistributedDataParallel)
                with self.replica.no_sync() if skip else contextlib.nullcontext():
                    loss = nn.functional.cross_entropy(self.replica(inputs), targets)
                    ids = ",".join(map(str, indices.tolist()))
                    tell("loss", number, evaluation, part, float(loss.item()).hex(), ids)
                    (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            evaluation += 1
            if CONFIG.optimizer == "lbfgs" and dist.is_initialized():
                dist.all_reduce(total)  # it decides by the loss: all replicas must by the same one
            return total

        if CONFIG.optimizer == "lbfgs":
            self.finish(lambda: self.optimizer.step(compute))  # type: ignore[arg-type]
            return
        compute()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.finish(self.optimizer.step)

    def finish(self, update: Callable[[], object]) -> None:
        """Do the update and the scheduler's."""
        number = FAULTS.step
        if CONFIG.update:
            with self.session.update():
                update()
                self.scheduler.step()
                if self.session.step != number:
                    raise RuntimeError("a step counts before it is complete")
            tell("done", number, os.getpid())
            FAULTS.at("after-update")
        else:
            update()
            tell("done", number, os.getpid())
            FAULTS.at("after-update")
            self.scheduler.step()
        FAULTS.step = number + 1

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the batches of one step after another."""
        session = self.session
        if CONFIG.loop == "plain":
            for _ in range(session.step, CONFIG.steps):
                FAULTS.at("loader")
                yield [drawn() for _ in range(CONFIG.accumulate)]
            return
        data = Samples()
        if CONFIG.loop == "batches":
            sampler: Any = DistributedSampler(data, WORLD_SIZE, RANK, shuffle=True, seed=3)
            loader = DataLoader(data, 4, sampler=sampler, num_workers=CONFIG.workers)
            seed = 7
        else:
            loader, seed = DataLoader(data, 4, shuffle=True, num_workers=CONFIG.workers), None
        together: list[Batch] = []
        for batch in session.batches(loader, steps=CONFIG.steps, seed=seed):
            together.append(tuple(batch))
            if len(together) == CONFIG.accumulate:
                yield together
                together = []


def drawn() -> Batch:
    """Return a batch from torch's own generator: in a repeated step it must be the same one."""
    return torch.randint(0, 1000, (4,)), torch.randn(4, WIDTH), torch.randint(0, CLASSES, (4,))


def run(session: frun.Session, made: tuple[nn.Module, torch.optim.Optimizer, Any] | None) -> None:
    """Train to the end from wherever the session stands."""
    tell("enter", os.getpid(), session.generation)
    if made is None:
        meet()
    training = Training(session, made if made is not None else build())
    FAULTS.at("agree")
    FAULTS.step = session.restore(
        model=training.model, optimizer=training.optimizer, scheduler=training.scheduler
    )
    tell("restored", os.getpid(), FAULTS.step)
    FAULTS.at("before-first-step")
    training.wrap()
    for batches in training.batches():
        if CONFIG.catching:
            try:
                training.step(batches)
            except Exception as error:  # noqa: BLE001 - as careless scripts do
                tell("caught", type(error).__name__)
                continue
        else:
            training.step(batches)
    for undo in training.undo:
        undo()
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": {
            k: v for k, v in training.scheduler.state_dict().items() if k != "lr_lambdas"
        },
    }
    tell(
        "final",
        os.getpid(),
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        FAULTS.step,
        digest(state),
    )
    FAULTS.at("end")
    if made is None and dist.is_initialized():
        dist.destroy_process_group()


def meet() -> None:
    """Make the process groups, if there is a world."""
    if "WORLD_SIZE" not in os.environ:
        return
    FAULTS.at("groups")
    dist.init_process_group("gloo")
    if not CONFIG.outside:  # one made once, outside, is of the first generation only
        FAULTS.at("subgroup")
        dist.barrier(dist.new_group(list(range(WORLD_SIZE))))


@frun.resumable
def train(session: frun.Session, made: Any = None) -> None:
    """Be entered again after every fault of another rank."""
    run(session, made)


if __name__ == "__main__":
    (FOLDER / f"ready.{RANK}").touch()
    if WORLD_SIZE > 1:
        places_in_recovery()
    if CONFIG.outside:
        meet()
        train(build())
        if dist.is_initialized():
            dist.destroy_process_group()
    else:
        train()
    # Python gives signals back on its way out, and who asks for stacks then would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
