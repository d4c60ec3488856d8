"""Commands whose help ends with examples to copy."""

from typing import Any

import click


class ExampleSection:
    """Mixed into a click command, it adds the section of examples to its help, a line each, never wrapped.

    Attributes:
        examples: command lines as a user types them.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class ExampleCommand(ExampleSection, click.Command):
    """A command with examples."""
