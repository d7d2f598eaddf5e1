"""The agent of `grid_gigpo.py`: a tiny model, its SFT data, how it acts, and its exact success rate.

It sees its cell and the goal, not its path, and says one word. So its walk is a Markov chain, and the probability of
arriving in time follows from its action probabilities in each cell, without rollouts or noise.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]

from grid_world import MOVES, Cell, GridEnv, grid_of  # noqa: E402

WORLD: dict[str, Any] = {"layout": 4, "size": 6, "walls": 0.2, "goals": 4, "least_distance": 5, "strict": False}
TURNS = 36
GUIDED = 0.25
"""The share of SFT moves that lead nearer to the goal; the others are random."""
REPEATED = 12
"""SFT walks per episode."""
HELD_OUT = 5
"""Every fifth pair of start and goal is held out."""
CONTROL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = """\
{%- for message in messages if message.role != 'system' %}
{{- '<|' + message.role + '|>' + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def episodes(count: int = 4000) -> tuple[list[int], list[int]]:
    """Training and held-out episodes; each pair of start and goal occurs once."""
    pairs: dict[tuple[Cell, Cell], int] = {}
    for number in range(count):
        env = GridEnv(episode=number, **WORLD)
        pairs.setdefault((env.start, env.goal), number)
    found = [pairs[pair] for pair in sorted(pairs)]
    Random(0).shuffle(found)
    return [e for i, e in enumerate(found) if i % HELD_OUT], found[::HELD_OUT]


def taught_walks(numbers: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """SFT data: mostly random walks, one observation and one move per conversation."""
    random = Random(f"taught/{seed}")
    grid = grid_of(WORLD["layout"], WORLD["size"], WORLD["walls"])
    for number in numbers * REPEATED:
        env = GridEnv(episode=number, max_turns=TURNS, **WORLD)
        sight = asyncio.run(env.reset())
        for _ in range(TURNS):
            good = grid.good_moves(env.at, env.goal)
            move = random.choice(good if random.random() < GUIDED else list(MOVES))
            said = [{"role": "user", "content": sight}, {"role": "assistant", "content": move}]
            yield {"messages": said}
            sight, _, done, _ = asyncio.run(env.step(move))
            if done:
                break


def fresh_model(folder: Path, seed: int) -> None:
    """An untrained Llama of about 70,000 weights, and a tokenizer with one token per word and per cell: the model must
    learn the way, not how two coordinates relate."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    cells = [f"x{x} y{y}" for x in range(WORLD["size"]) for y in range(WORLD["size"])]
    words = ["<|unk|>", *CONTROL, "at", "goal", *MOVES, *cells]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"x\d+ y\d+|\S+"), "removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        extra_special_tokens=CONTROL[2:],
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


class OneWord:
    """An agent that sees only the current observation and says one token: in a grid nothing else matters. It keeps the
    policy's tokens, so that its actions are trained on like any others."""

    def __init__(self, policy: Any, prompts: dict[str, list[int]], *, seed: int = 0, do_sample: bool = True) -> None:
        self.policy, self.prompts = policy, prompts
        self.sampling = replace(policy.sampling, do_sample=do_sample, max_new_tokens=1)
        self.seed, self.turn = seed, 0

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Any = None) -> OneWord:
        return OneWord(self.policy, self.prompts, seed=seed, do_sample=do_sample)

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        sight = observation[-1]
        if sight.content not in self.prompts:
            self.prompts[sight.content] = self.policy.chat.start([sight])
        prompt = self.prompts[sight.content]
        self.turn += 1
        said = await self.policy.generate(prompt, replace(self.sampling, seed=self.seed * 4093 + self.turn))
        word = self.policy.chat.decode(said.token_ids)
        logprobs = {
            "token_ids": said.token_ids,
            "logprobs": said.logprobs,
            "prompt_ids": prompt,
            "finish_reason": "stop",
            "policy_version": said.policy_version,
        }
        return {"type": "text", "content": word}, word, logprobs, None


class Chances:
    """The probability that the current policy arrives within `TURNS` moves."""

    def __init__(self, policy: Any) -> None:
        from toolwise.messages import Message

        env = GridEnv(episode=0, **WORLD)
        self.policy, self.grid = policy, env.grid
        goals = sorted({GridEnv(episode=e, **WORLD).goal for e in range(200)})
        self.places = [(goal, cell) for goal in goals for cell in env.grid.free]
        self.prompts: list[list[int]] = []
        for env.goal, env.at in self.places:
            self.prompts.append(policy.chat.start([Message(role="user", content=env.sight())]))
        heard = [env.heard(policy.chat.decode([word])) for word in range(policy.vocabulary)]
        self.meaning = [[float(move == word) for move in MOVES] for word in heard]

    def mean(self, numbers: Sequence[int]) -> float:
        """The mean over these episodes."""
        arrival = self._arrival()
        pairs = [(env.goal, env.start) for env in (GridEnv(episode=e, **WORLD) for e in numbers)]
        return sum(arrival[pair] for pair in pairs) / len(pairs)

    def _arrival(self) -> dict[tuple[Cell, Cell], float]:
        """From each cell to each goal, by backward induction from the last turn."""
        chances = dict(zip(self.places, self._moves(), strict=True))
        reached = {cell: [self.grid.after(cell, move) for move in MOVES] for cell in self.grid.free}
        found = {(goal, cell): float(goal == cell) for goal, cell in self.places}
        for _ in range(TURNS):
            found = {
                (goal, cell): 1.0
                if goal == cell
                else sum(p * found[goal, to] for p, to in zip(chances[goal, cell], reached[cell], strict=True))
                for goal, cell in self.places
            }
        return found

    def _moves(self) -> list[list[float]]:
        """Probability of each move, for each goal and cell."""
        import torch

        with torch.no_grad():
            logits = self.policy.model(torch.tensor(self.prompts)).logits[:, -1].double()
        chances: list[list[float]] = (torch.softmax(logits, -1) @ torch.tensor(self.meaning).double()).tolist()
        return chances
