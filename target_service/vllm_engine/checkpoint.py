"""The files of a model that vLLM has loaded."""

from pathlib import Path

from outrider.errors import ModelUnsupported


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model that vLLM has loaded; raise `ModelUnsupported` where it is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelUnsupported(f"the files of {model} are not on this machine: {error}") from error
