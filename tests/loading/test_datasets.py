"""Questions from the hub's data sets over a loopback service: what is asked, what is kept, what people read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import close_session, constants

from dflash_mlx.errors import HubError, UsageError
from dflash_mlx.loading import dataset_rows
from dflash_mlx.loading.datasets import DATASETS, check_datasets, dataset_questions

ROWS = {
    "openai/openai_humaneval": [{"prompt": "def f():\n", "canonical_solution": "..."}],
    "openai/gsm8k": [{"question": f"How many {n}?", "answer": "4"} for n in range(100)],
    "HuggingFaceH4/MATH-500": [{"problem": "Solve it.", "level": 3}],
    "google-research-datasets/mbpp": [{"prompt": "Write f.", "test_list": ["assert f() == 1", "assert f()"]}],
    "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["First turn.", "Second turn."], "category": "writing"}],
}


class Service:
    """Rows of data sets as the hub's service gives them."""

    def __init__(self):
        self.asked = []
        self.status = 200
        self.rows = ROWS
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                service.asked.append((parts.path, query))
                rows = [{"row_idx": i, "row": row} for i, row in enumerate(service.rows[query["dataset"]])]
                body = json.dumps({"features": [], "rows": rows}).encode()
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def service(tmp_path, monkeypatch):
    close_session()
    made = Service()
    threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset_rows, "SERVICE", made.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield made
    made.server.shutdown()
    made.server.server_close()
    close_session()


def refused(name):
    with pytest.raises(HubError) as caught:
        dataset_questions(name, 2)
    assert "\n" not in str(caught.value) and "leave out --dataset" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("humaneval", "```python\ndef f():\n```"),
        ("gsm8k", "How many 0?\n\nShow"),
        ("math500", "Solve it.\n\nShow"),
        ("mbpp", "Write f. It must pass this:\n\n```python\nassert f() == 1\n```"),
        ("mt-bench", "First turn."),
    ],
)
def test_each_set_becomes_prompts(service, name, part):
    [prompt] = dataset_questions(name, 1)
    assert part in prompt and "Second" not in prompt
    path, query = service.asked[0]
    found = DATASETS[name]
    assert path == "/rows" and (query["dataset"], query["config"], query["split"]) == (
        found.repo,
        found.config,
        found.split,
    )


def test_questions_are_spread_over_the_rows(service):
    found = dataset_questions("gsm8k", 4)
    assert [text.split("?")[0] for text in found] == [f"How many {n}" for n in (0, 25, 50, 75)]
    assert len(dataset_questions("gsm8k", 1000)) == 100


def test_what_was_fetched_is_kept_and_asked_for_once(service, monkeypatch):
    first = dataset_questions("gsm8k", 3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert dataset_questions("gsm8k", 3) == first and len(service.asked) == 1


def test_a_damaged_file_is_fetched_again(service, tmp_path):
    first = dataset_questions("gsm8k", 3)
    (tmp_path / "cache" / "datasets" / "openai--gsm8k-100.json").write_text("[{")
    assert dataset_questions("gsm8k", 3) == first and len(service.asked) == 2


@pytest.mark.parametrize(("status", "why"), [(404, "no public data set"), (429, "wait"), (503, "503")])
def test_an_answer_that_is_an_error_is_told(service, status, why):
    service.status = status
    message = refused("gsm8k")
    assert message.startswith("The data set openai/gsm8k could not be fetched") and why in message


def test_no_connection_is_told(service, monkeypatch):
    monkeypatch.setattr(dataset_rows, "SERVICE", "http://127.0.0.1:9")
    assert "there is no connection to http://127.0.0.1:9" in refused("mbpp")


def test_offline_nobody_is_asked(service, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not in the cache and HF_HUB_OFFLINE is set" in refused("mbpp")
    assert service.asked == []


@pytest.mark.parametrize("rows", [[], [{"text": "other"}], ["text"], [{"question": None}]])
def test_rows_of_another_shape_are_told_and_not_kept(service, rows):
    service.rows = {"openai/gsm8k": rows}
    assert ("has another shape than expected" if rows else "has no rows") in refused("gsm8k")
    service.rows = ROWS
    assert dataset_questions("gsm8k", 1)


def test_an_unknown_name_is_refused():
    with pytest.raises(UsageError, match="'imagenet' is no data set known here; they are humaneval"):
        check_datasets(["gsm8k", "imagenet"])
