"""Figures in words, the same in the terminal and on the page."""

from frun.account.timeline import Bucket

TITLES = {
    Bucket.PRODUCTIVE: "productive",
    Bucket.REPEATED: "repeated steps",
    Bucket.DETECTION: "detection",
    Bucket.PAUSE: "pause",
    Bucket.RESPAWN: "respawn",
    Bucket.REBUILD: "rebuild",
    Bucket.COPY: "state copy",
    Bucket.FIRST_STEP: "first step",
    Bucket.WAITING: "waiting for hosts",
    Bucket.CHECKPOINT: "checkpoint",
    Bucket.START_UP: "start-up",
    Bucket.IDLE: "idle",
}
COLOURS = {
    Bucket.PRODUCTIVE: "#4c9f70",
    Bucket.REPEATED: "#b08a3c",
    Bucket.DETECTION: "#c8463c",
    Bucket.PAUSE: "#e07b39",
    Bucket.RESPAWN: "#d9a441",
    Bucket.REBUILD: "#7d6bb0",
    Bucket.COPY: "#4f7cac",
    Bucket.FIRST_STEP: "#58a4b0",
    Bucket.WAITING: "#a05195",
    Bucket.CHECKPOINT: "#6c8f3d",
    Bucket.START_UP: "#8d99ae",
    Bucket.IDLE: "#c9ced6",
}
"""Apart in lightness as well as in hue, for eyes that see few hues."""


def duration(us: int) -> str:
    """Return a time for people: 0.304 s, 12.3 s, 4 min 05 s, 3 h 07 min, 12 d 5 h."""
    seconds = us / 1_000_000
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def percent(part: int, whole: int) -> str:
    """Return a share: 98.7 %."""
    return f"{100 * part / whole:.2f} %" if whole > 0 else "0.00 %"


def ranks(numbers: list[int]) -> str:
    """Return `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
