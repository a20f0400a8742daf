"""The errors of the emulation."""


class EmulationError(Exception):
    """A kernel does something that the compiler would refuse, or that is undefined on the device."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise EmulationError(message)
