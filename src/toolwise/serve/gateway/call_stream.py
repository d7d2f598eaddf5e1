"""A recorded call as a stream: the chunks of the reply while it is sampled. It is recorded once it is complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.messages import Message
from toolwise.rollout.agents.recorded_call import CallOptions, RecordedCall
from toolwise.rollout.agents.recorded_session import RecordedSession, SessionEndedError, SessionPolicy
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.chat import opens_thought
from toolwise.serve.choice_stream import ChoiceStream
from toolwise.serve.event_stream import Chunks
from toolwise.serve.gateway.wire_format import ChatCall, call_usage, logprob_entries, token_texts

_PROBE = [Message(role="user", content="hello")]


async def stream_call(call: ChatCall, session: RecordedSession, model: str) -> Chunks:
    """Chunks with more and more of the message; the end, with log-probs and token ids if they were asked for; usage."""
    options, sampled = call.options, asyncio.Queue[Sequence[int] | asyncio.Task[RecordedCall]]()
    stream = _choice_stream(call, options, session.policy)
    head = {"id": f"chatcmpl-{uuid4().hex}", "object": "chat.completion.chunk", "created": int(time.time())}
    head["model"] = model
    start = {"role": "assistant", "content": ""}
    work = spawn(session.complete(call.messages, call.specs or None, options, on_tokens=sampled.put_nowait))
    work.add_done_callback(sampled.put_nowait)
    try:
        while not isinstance(news := await sampled.get(), asyncio.Task):
            if delta := stream.feed(news):
                yield {**head, "choices": [{"index": 0, "delta": start | delta, "finish_reason": None}]}
                start = {}
        if news.cancelled():
            raise SessionEndedError("this session has ended")
        recorded = news.result()
    finally:
        work.cancel()
        await wait_all([work])
    reason = recorded.tokens.finish_reason
    rest = start | stream.finish(recorded.text, "length" if reason == "length" else "stop")
    if rest:
        yield {**head, "choices": [{"index": 0, "delta": rest, "finish_reason": None}]}
    prompt = {"prompt_token_ids": list(recorded.tokens.prompt_ids)} if call.return_token_ids else {}
    yield {**head, **prompt, "choices": [_end(call, recorded, stream.called, session)]}
    if (call.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": call_usage(recorded)}


def _end(call: ChatCall, recorded: RecordedCall, called: bool, session: RecordedSession) -> dict[str, Any]:
    reason = recorded.tokens.finish_reason
    choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": reason}
    if called and reason == "stop":
        choice["finish_reason"] = "tool_calls"
    if call.logprobs:
        texts = token_texts(call, recorded, session.policy.chat)
        choice["logprobs"] = {"content": logprob_entries(recorded, texts)}
    if call.return_token_ids:
        choice["token_ids"] = list(recorded.tokens.token_ids)
    return choice


@lru_cache(maxsize=4)
def _opens_thoughts(chat: ChatTokenizer) -> bool:
    return opens_thought(chat.render(_PROBE))


def _choice_stream(call: ChatCall, options: CallOptions, policy: SessionPolicy) -> ChoiceStream:
    chat, stops = policy.chat, policy.sampling.stop_token_ids
    reads_calls = options.reads_calls and bool(call.specs)
    # The recorded reply is read without knowing whether its prompt opened a thought. Where it may have, calls wait for
    # the end, as there.
    thought_open = None if _opens_thoughts(chat) else False
    return ChoiceStream(
        lambda ids: chat.decode(ids, stops),
        options.stop,
        policy.call_format.stream(thought_open, call.specs) if reads_calls else None,
        call_id=options.public_id,
    )
