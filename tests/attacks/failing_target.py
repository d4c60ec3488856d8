"""A target whose device breaks; see `failing_model`."""

from target_service.__main__ import main
from tests.attacks.failing_model import break_at_fatal_token

if __name__ == "__main__":
    break_at_fatal_token()
    main()
