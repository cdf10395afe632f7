from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from dflash_mlx.runtime import Machine
from tests.loading.hub_server import Hub


@pytest.fixture
def cpu() -> Machine:
    import mlx.core as mx

    return Machine("cpu", "test", 16.0, "test", "test", mx.float32)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A loopback hub that huggingface-hub asks in this test, and an empty cache."""
    with Hub() as server:
        point_to(server.url, tmp_path / "cache", monkeypatch)
        yield server
    close_session()


def point_to(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_session()  # a client of an earlier test keeps its connections
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
