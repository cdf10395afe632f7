"""Rows of a public data set: fetched page by page once, and what is said when they cannot be."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import close_session, constants

from dflash_mlx.errors import HubError, UsageError
from dflash_mlx.loading import dataset_rows as module
from dflash_mlx.loading.dataset_rows import dataset_rows
from dflash_mlx.training.prompts import prompts_of_rows


class Service:
    """The part of the hub's service for rows that is asked."""

    def __init__(self, rows: int):
        self.rows, self.status, self.requests = rows, 200, list[str]()
        self.splits = [{"config": "c", "split": "test"}, {"config": "c", "split": "train"}]
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                path = urlsplit(self.path)
                asked = {name: values[0] for name, values in parse_qs(path.query).items()}
                service.requests.append(path.path)
                answer: dict[str, object] = {"splits": service.splits}
                if path.path == "/rows":
                    assert (asked["config"], asked["split"]) == ("c", "train")
                    first = int(asked["offset"])
                    last = min(first + min(100, int(asked["length"])), service.rows)
                    answer = {"rows": [{"row": {"prompt": f"Question {i}?"}} for i in range(first, last)]}
                data = json.dumps(answer).encode()
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    close_session()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    made = Service(rows=230)
    monkeypatch.setattr(module, "SERVICE", f"http://127.0.0.1:{made.server.server_port}")
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    close_session()


def test_rows_come_page_by_page_and_once(service: Service) -> None:
    rows = dataset_rows("some/set", 150)
    assert [row["prompt"] for row in rows] == [f"Question {i}?" for i in range(150)]
    assert service.requests == ["/splits", "/rows", "/rows"]
    assert dataset_rows("some/set", 150) == rows and len(service.requests) == 3
    assert len(dataset_rows("some/set", 1000)) == 230  # all there are
    prompts = prompts_of_rows(rows, "some/set")
    assert (prompts[1].messages[0]["content"], prompts[1].place) == ("Question 1?", "some/set, row 2")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (404, "there is no public data set"),
        (429, "too many requests"),
        (401, "private, gated"),
        (503, "answered 503"),
    ],
)
def test_a_refusal_is_one_sentence(service: Service, status: int, says: str) -> None:
    service.status = status
    with pytest.raises(HubError, match=says) as found:
        dataset_rows("some/set", 10)
    assert "--prompts" in str(found.value)


def test_what_cannot_be_asked_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected owner/name"):
        dataset_rows("nonsense", 10)
    service.splits = []
    with pytest.raises(HubError, match="has no rows that the hub can show"):
        dataset_rows("some/set", 10)
    monkeypatch.setattr(module, "SERVICE", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="there is no connection"):
        dataset_rows("some/set", 10)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        dataset_rows("some/set", 10)


def test_a_row_without_a_prompt_is_named() -> None:
    with pytest.raises(UsageError, match=r"some/set, row 2: none of messages"):
        prompts_of_rows([{"prompt": "x"}, {"label": 3}], "some/set")
