"""What a script of a client prints: a line of JSON for each call, which `python -m tests.clients` reads."""

import json
import traceback
from collections.abc import Callable


def call(name: str, check: Callable[[], object]) -> None:
    """Run one call with its checks, and print how it went."""
    try:
        check()
    except Exception:
        print(json.dumps({"call": name, "passed": False, "problem": traceback.format_exc()[-1500:]}), flush=True)
    else:
        print(json.dumps({"call": name, "passed": True}), flush=True)


def expect(holds: object, *what: object) -> None:
    """Raise `AssertionError` unless it holds."""
    if not holds:
        raise AssertionError(*what)


def refused(kind: type[Exception], run: Callable[[], object]) -> Exception:
    """Return the error of a call that must fail with this kind."""
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
