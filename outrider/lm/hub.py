"""Models on the hub: what is wrong with one that cannot be had, found out before anything is loaded."""

from pathlib import Path
from typing import Final

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from outrider.errors import ModelUnsupported

_CONFIG: Final = "config.json"
_TIMEOUT_S: Final = 10.0
_PATH_STARTS: Final = ("/", "./", "../", "~")
_LOGIN: Final = "HF_TOKEN, or `hf auth login`, gives access"


def check_available(name: str) -> None:
    """Check that a folder exists, or that the hub's cache or the hub has the model.

    The hub is tried once. Libraries that load a model would try it again and again, for each of its files.

    Args:
        name: folder or hub id.

    Raises:
        ModelUnsupported: the model cannot be had; the message says why, and what to do.
    """
    if Path(name).is_dir():
        return
    if name.startswith(_PATH_STARTS):
        raise ModelUnsupported(f"no such folder: {name}")
    try:
        cached = try_to_load_from_cache(name, _CONFIG)
    except HFValidationError:
        raise ModelUnsupported(f"no such folder: {name}") from None
    if not isinstance(cached, str):
        _check_hub(name)


def local_folder(name: str) -> Path:
    """Return the folder of a model; one on the hub is downloaded first, unless the cache has it.

    Raises:
        ModelUnsupported: the model cannot be had.
    """
    check_available(name)
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name))
    except Exception as error:
        raise ModelUnsupported(f"cannot download {name}: {_first_line(error)}") from error


def _check_hub(name: str) -> None:
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=_TIMEOUT_S)
    except EntryNotFoundError:
        raise ModelUnsupported(f"{name} on {constants.ENDPOINT} has no {_CONFIG}") from None
    except GatedRepoError:
        raise ModelUnsupported(f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}; {_LOGIN}") from None
    except RepositoryNotFoundError:
        problem = f"no such folder, and no such model on {constants.ENDPOINT}: {name}; if it is private, {_LOGIN}"
        raise ModelUnsupported(problem) from None
    except OfflineModeIsEnabled:
        problem = f"{name} is not in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, or give a folder"
        raise ModelUnsupported(problem) from None
    except Exception as error:
        # Whatever the client's HTTP library raises: it has changed from version to version.
        raise ModelUnsupported(
            f"cannot download {name}: {constants.ENDPOINT} is not reachable ({_first_line(error)}); "
            f"give a folder, or run `hf download {name}` where it is reachable and copy the cache"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
