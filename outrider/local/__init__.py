"""A whole Outrider on this machine: Redis, targets, drafts and orchestrators as processes that end with this one."""

from outrider.local.stack import LocalStack
from outrider.local.stack_options import DraftOptions, StackOptions

__all__ = ["DraftOptions", "LocalStack", "StackOptions"]
