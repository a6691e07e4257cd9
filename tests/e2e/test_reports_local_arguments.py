"""REPORTS.md, one machine: what reaches the script, and which interpreter and folder it finds.

Spellings of flags before the script are in `tests/cli`; here is what a user sees end to end.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Site

ARGV = """
    import json, os, sys
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([sys.argv[1:], sys.path[0], sys.executable, sys.prefix]), flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_r01_tokens_after_the_script_are_the_scripts(site: Site, method: str) -> None:
    """Every token arrives unchanged and in order, whatever flag of the launcher it looks like."""
    script = site.script("argv.py", ARGV)
    tokens = ["--r=16", "--no", "--max=3", "--help", "-h", "--nnodes", "9", "-5", "-1e-3", ""]
    tokens += ["a b", "--", "--x", "@file", "-m", "--standalone", "--config", "run"]
    done = site.run("--start-method", method, script, *tokens)
    assert done.code == 0, done.err
    assert json.loads(done.out)[0] == tokens


def test_r02_abbreviations_before_the_script(site: Site) -> None:
    """Unique ones work, the spellings of one flag are one candidate, a clash names the candidates."""
    script = site.script("argv.py", ARGV)
    done = site.run("--start-m", "spawn", "--stand", "--nproc=2", script, "--nproc=5")
    assert (done.code, json.loads(done.out)[0]) == (0, ["--nproc=5"])
    clash = site.run("--no", script)
    assert clash.code == 2
    assert clash.err.count("\n") == 1
    for flag in ("--no-python", "--node-rank", "--nnodes"):
        assert (flag in clash.err) == (flag != "--nnodes")
    flag_as_value = site.run("--role", "--nnodes", script)
    assert flag_as_value.code == 2
    assert "--role" in flag_as_value.err


def test_r05_workers_use_the_interpreter_that_runs_frun(site: Site, tmp_path: Path) -> None:
    """Links are not followed, also not with a space in the path; PYTHON_EXEC overrides."""
    home = tmp_path / "an env"
    (home / "bin").mkdir(parents=True)
    python = home / "bin" / "python"
    python.symlink_to(Path(sys.base_prefix, "bin", "python3"))
    config = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8")
    (home / "pyvenv.cfg").write_text(config, encoding="utf-8")
    (home / "lib").symlink_to(Path(sys.prefix, "lib"))
    script = site.script("argv.py", ARGV)
    for method in ("fork", "spawn"):
        done = site.run(
            "--start-method", method, script, program=(str(python), "-m", "frun"),
            env={"LOGLEVEL": "INFO"},
        )  # fmt: skip
        assert done.code == 0, done.err
        assert json.loads(done.out)[2:] == [str(python), str(home)]
        assert str(python) in done.err
    other = site.run(script, env={"PYTHON_EXEC": str(python)})
    assert json.loads(other.out)[2:] == [str(python), str(home)]


def test_r12_a_wrapper_binds_workers_to_cores(site: Site) -> None:
    """Its variables are set before it runs; the inner program's status and its end pass through."""
    site.script("wrap.sh", '#!/bin/sh\nexec taskset -c $LOCAL_RANK "$@"\n')
    site.script("nest.sh", '#!/bin/sh\ntaskset -c $LOCAL_RANK "$@"\nexit $?\n')
    for name in ("wrap.sh", "nest.sh"):
        (site.cwd / name).chmod(0o755)
    script = site.script(
        "fail.py",
        """
        import os, sys, time
        print("cpus", os.environ["RANK"], *os.sched_getaffinity(0), flush=True)
        if os.environ["RANK"] != "1":
            time.sleep(600)
        while not os.path.exists("go"):
            time.sleep(0.02)
        sys.exit(7)
        """,
    )
    for name in ("wrap.sh", "nest.sh"):
        go = site.cwd / "go"
        go.unlink(missing_ok=True)
        job = site.start(
            "--nproc-per-node", "2", "--no-python", f"./{name}", sys.executable, script
        )
        assert sorted(job.expect(r"cpus \d+ \d+\n", 2)) == ["cpus 0 0\n", "cpus 1 1\n"]
        go.touch()
        done = job.wait()
        assert done.code == 1
        assert "exit status 7" in done.err
        assert not site.left_processes()


def test_s06_arguments_are_no_template_but_for_the_local_rank(site: Site) -> None:
    """`$$` and other `$NAME` stay as they are."""
    script = site.script("argv.py", ARGV)
    done = site.run("--start-method", "spawn", script, "a$$b", "${local_rank}/$HOME", "$local_rank")
    assert json.loads(done.out)[0] == ["a$$b", "0/$HOME", "0"]


@pytest.mark.parametrize("count", [1, 2])
def test_s13_only_the_first_worker_reads_stdin(site: Site, count: int, tmp_path: Path) -> None:
    """A pipe reaches local rank 0 whole, whoever is first; the others see its end at once."""
    script = site.script(
        "read.py",
        """
        import os, sys
        print(os.environ["RANK"], repr(sys.stdin.read()), flush=True)
        """,
    )
    text = tmp_path / "input"
    text.write_bytes(b"5\n")
    with text.open("rb") as stdin:
        done = site.run("--nproc-per-node", str(count), script, stdin=stdin)
    assert done.lines() == ["0 '5\\n'", "1 ''"][:count]
