"""Retries in simulated time: hours of server failures in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ContextFullError, PolicyError
from toolwise.remote.endpoint import Endpoint
from toolwise.remote.server_errors import ServerError
from toolwise.testing import virtual_time

T = TypeVar("T")
URL = "http://server.test/v1/chat/completions"
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


def simulate(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of `work`, and how long it took in simulated time."""

    async def timed() -> tuple[T, float]:
        return await work, asyncio.get_running_loop().time()

    return virtual_time.simulate(timed())


def status(code: int, **headers: str) -> Answer:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(code, headers={k.replace("_", "-"): v for k, v in headers.items()}, json={"said": code})

    return answer


def raising(fault: type[httpx.TransportError]) -> Answer:
    async def answer(request: httpx.Request) -> httpx.Response:
        raise fault("gone")

    return answer


async def stall(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(1e9)
    raise AssertionError("nobody waits that long")


async def broken(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b'{"choices": [')


async def endless(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b"x" * 2_000)


fine = status(200)


def endpoint(answers: list[Answer], **more: Any) -> Endpoint:
    left = iter(answers)

    async def handle(request: httpx.Request) -> httpx.Response:
        return await next(left, fine)(request)

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle), timeout=None)
    return Endpoint(URL, client=client, **{"timeout_s": 10.0, "deadline_s": 100.0, "backoff_s": 1.0, **more})


def read(value: Any, headers: Mapping[str, str]) -> Any:
    return value


def ask(asked: Endpoint) -> tuple[Any, float]:
    return simulate(asked.ask({"q": 1}, read))


def refused(asked: Endpoint) -> tuple[PolicyError, float]:
    async def work() -> PolicyError:
        with pytest.raises(PolicyError) as caught:
            await asked.ask({"q": 1}, read)
        return caught.value

    return simulate(work())


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (status(429), "rate_limited"),
        (status(500), "server_error"),
        (status(503), "server_error"),
        (raising(httpx.ConnectError), "connect"),
        (raising(httpx.ReadError), "dropped"),
        (raising(httpx.RemoteProtocolError), "dropped"),
        (raising(httpx.ReadTimeout), "timeout"),
        (stall, "timeout"),
        (broken, "bad_reply"),
    ],
)
def test_passing_trouble_is_asked_again_and_counted(trouble: Answer, kind: str) -> None:
    asked = endpoint([trouble, trouble])
    answer, _ = ask(asked)
    assert answer == {"said": 200}
    assert asked.metrics() == {
        "policy/requests": 3.0,
        "policy/retries": 2.0,
        f"policy/retries/{kind}": 2.0,
        "policy/failures": 0.0,
    }


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [(status(401), "refused"), (status(404), "refused"), (status(302), "redirect"), (endless, "too_big")],
)
def test_lasting_trouble_is_not_asked_again(trouble: Answer, kind: str) -> None:
    asked = endpoint([trouble], max_reply_bytes=1_000)
    fault, took_s = refused(asked)
    assert isinstance(fault, ServerError)
    assert fault.kind == kind
    assert took_s == 0
    assert asked.metrics() == {
        "policy/requests": 1.0,
        "policy/retries": 0.0,
        "policy/failures": 1.0,
        f"policy/failures/{kind}": 1.0,
    }


def test_after_the_last_attempt_the_fault_names_the_server_and_the_attempts() -> None:
    fault, _ = refused(endpoint([status(500)] * 9, max_retries=2))
    assert str(fault) == f'server at {URL}: HTTP 500: {{"said":500}} (3 attempts)'


def test_a_full_context_is_an_ending_and_no_failure() -> None:
    async def full(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "too long", "code": "context_length_exceeded"}})

    asked = endpoint([full])
    fault, _ = refused(asked)
    assert isinstance(fault, ContextFullError)
    assert URL in str(fault)
    assert asked.metrics()["policy/context_full"] == 1
    assert asked.metrics()["policy/failures"] == 0


def test_pauses_double_with_chance_in_them_up_to_a_limit() -> None:
    def pauses(seed: int) -> list[float]:
        times: list[float] = []

        async def failing(request: httpx.Request) -> httpx.Response:
            times.append(asyncio.get_running_loop().time())
            return httpx.Response(500)

        refused(endpoint([failing] * 6, max_retries=5, seed=seed))
        return [later - earlier for earlier, later in pairwise(times)]

    first, again, other = map(pauses, (1, 1, 2))
    assert first == again != other
    assert all(1 / 2 <= pause / 2**i <= 1 + 1e-9 for i, pause in enumerate(first))


def test_a_server_that_names_a_wait_is_given_it() -> None:
    _, took_s = ask(endpoint([status(429, retry_after="20")]))
    assert 20 <= took_s <= 21


def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    fault, took_s = refused(endpoint([status(429, retry_after="3600")]))
    assert took_s == 0
    assert "HTTP 429" in str(fault)


def test_one_attempt_has_its_time_and_all_of_them_theirs() -> None:
    fault, took_s = refused(endpoint([stall] * 99, timeout_s=10, deadline_s=25, max_retries=99))
    assert took_s <= 25
    assert "no complete reply" in str(fault)


def test_the_deadline_holds_for_whoever_waits_for_a_place() -> None:
    asked = endpoint([stall] * 9, max_concurrent=1, max_retries=0, timeout_s=60, deadline_s=100)

    async def crowd() -> list[Any]:
        return await asyncio.gather(*(asked.ask({}, read) for _ in range(4)), return_exceptions=True)

    faults, took_s = simulate(crowd())
    assert [type(fault) for fault in faults] == [ServerError] * 4
    assert took_s == pytest.approx(100)


def test_no_more_at_once_than_allowed_and_none_of_them_while_pausing() -> None:
    at_once, most = 0, 0

    async def busy(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(1)
        at_once -= 1
        return httpx.Response(500)

    asked = endpoint([busy] * 12, max_concurrent=3, backoff_s=1.0)

    async def crowd() -> list[Any]:
        return await asyncio.gather(*(asked.ask({}, read) for _ in range(12)))

    answers, took_s = simulate(crowd())
    assert answers == [{"said": 200}] * 12
    assert most == 3
    assert took_s <= 4 + 1  # four rounds of a second; delays overlap with other requests


def test_what_the_reader_makes_of_a_reply_may_be_asked_again_too() -> None:
    tries: list[Any] = []

    def picky(value: Any, headers: Mapping[str, str]) -> str:
        tries.append(value)
        if len(tries) < 3:
            raise ServerError("bad_reply", "no choices", retryable=True)
        return "at last"

    asked = endpoint([])
    assert simulate(asked.ask({}, picky))[0] == "at last"
    assert asked.metrics()["policy/retries/bad_reply"] == 2


def test_the_key_is_sent_and_never_told() -> None:
    async def echo(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": {"message": f"bad {request.headers['authorization']}"}})

    fault, _ = refused(endpoint([echo], api_key="sk-very-secret"))
    assert "bad Bearer …" in str(fault)
    assert "secret" not in str(fault)


def test_a_login_in_the_url_is_never_told() -> None:
    client = httpx.AsyncClient(transport=httpx.MockTransport(status(403)))
    endpoint = Endpoint("http://bob:hunter2@server.test/v1", client=client)
    with pytest.raises(ServerError, match=r"server at http://server\.test/v1: HTTP 403") as told:
        simulate(endpoint.ask({}, lambda value, headers: value))
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("url", ["", "localhost:8000/v1", "ftp://host/v1", "http:///v1", "http://host:port/v1"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(PolicyError, match="base_url"):
        Endpoint(url)


@pytest.mark.parametrize("key", ["", "key\n", "clé", " key"])
def test_a_key_that_no_header_can_hold_is_refused_unprinted(key: str) -> None:
    with pytest.raises(PolicyError, match="api_key") as caught:
        Endpoint(URL, api_key=key)
    assert not key.strip() or key.strip() not in str(caught.value).replace("api_key", "")


troubles = st.sampled_from([fine, status(429), status(429, retry_after="7"), status(500), stall, broken, status(400)])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(troubles, max_size=6), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(1, 3),
    st.floats(0.5, 60),
    st.integers(0, 2**16),
)
def test_every_question_ends_once_in_time_and_every_request_is_counted(
    scripts: list[list[Answer]], max_retries: int, places: int, deadline_s: float, seed: int
) -> None:
    left = {str(i): iter(script) for i, script in enumerate(scripts)}
    served = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal served
        served += 1
        return await next(left[request.content.decode().split('"')[3]], fine)(request)

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle), timeout=None)
    asked = Endpoint(
        URL,
        client=client,
        timeout_s=5,
        deadline_s=deadline_s,
        max_retries=max_retries,
        max_concurrent=places,
        seed=seed,
    )

    async def crowd() -> list[Any]:
        return await asyncio.gather(*(asked.ask({"q": name}, read) for name in left), return_exceptions=True)

    outcomes, took_s = simulate(crowd())
    assert took_s <= deadline_s + 1e-6
    assert all(outcome == {"said": 200} or isinstance(outcome, ServerError) for outcome in outcomes)
    counts = asked.metrics()
    assert counts["policy/failures"] == sum(isinstance(outcome, ServerError) for outcome in outcomes)
    assert counts["policy/requests"] == len(scripts) + counts["policy/retries"] >= served
    assert counts["policy/retries"] <= len(scripts) * max_retries
    for script, outcome in zip(scripts, outcomes, strict=True):
        first = next((i for i, answer in enumerate(script) if answer is fine), len(script))
        if isinstance(outcome, dict):
            assert first <= max_retries


@pytest.mark.parametrize("trouble", [raising(httpx.ConnectError), status(503), broken, stall])
def test_after_a_request_in_vain_others_need_not_wait_for_retries(trouble: Answer) -> None:
    times: list[float] = []
    answers = [trouble]

    async def asked() -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            return await answers[-1](request)

        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        endpoint = Endpoint(URL, timeout_s=5.0, retries_when_down=False, client=client)
        clock = asyncio.get_running_loop().time

        async def ask() -> None:
            began = clock()
            with suppress(ServerError):
                await endpoint.ask({}, lambda value, headers: value)
            times.append(clock() - began)

        await ask()  # in vain, with all its retries
        await ask()  # fails at once
        answers.append(status(200))
        await ask()  # the server is back
        answers.append(trouble)
        await ask()  # retries again

    simulate(asked())
    alone = 5.0 if trouble is stall else 0.0
    assert times[0] > 5.0
    assert times[1:3] == [alone, 0.0]
    assert times[3] > 5.0
