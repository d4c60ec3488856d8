from tests.cli.readme_settings import README, with_settings


def test_the_settings_tables_are_current() -> None:
    text = README.read_text()
    assert with_settings(text) == text, "run: python -m tests.cli.readme_settings"
