"""The exception that takes a script out of its step when its generation has ended."""


class Paused(BaseException):
    """This generation is over; frun enters the function again in the next one.

    Not an `Exception`, so that `except Exception` around a step does not hold it up. Raised in the main
    thread only, and only by frun's own parts: the loop, the optimizer and `session`.
    """
