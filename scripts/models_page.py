"""Write the table of model families in docs/models.md, from what the conformance tests check.

    .venv/bin/python scripts/models_page.py

Templates are those that TRL ships, rendered over the tokenizer that ships with Toolwise; engine paths are those of tiny
random models (tests/helpers/architectures.py). `tests/docs/test_models_page.py` fails if the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: scripts/models_page.py -->", "<!-- end of table -->"
HEADER = (
    "| family | chat template | tools are shown by | calls, results | parser | thinking | engine path |\n"
    + "|---" * 7
    + "|"
)

sys.path.append(str(ROOT / "tests" / "helpers"))

FAMILIES = {
    "Llama 3": ("llama3", "llama"),
    "Llama 3.1": ("llama3_1", "llama, llama3 rope"),
    "Llama 3.2": ("llama3_2", "llama, tied"),
    "Qwen2.5": ("qwen2_5", "qwen2"),
    "Qwen3": ("qwen3", "qwen3"),
    "Qwen3 2507": ("qwen3_instruct_2507", "qwen3"),
    "Qwen3 mixture of experts": ("qwen3", "qwen3, moe"),
    "Qwen3.5": ("qwen3_5_think", ""),
    "Qwen3.6": ("qwen3_6", ""),
    "Gemma, Gemma 2": ("gemma", "gemma2"),
    "Gemma 3": ("gemma3", "gemma3"),
    "Gemma 4": ("gemma4_v5", ""),
    "Phi-3": ("phi3", "phi3"),
    "Phi-3.5": ("phi3_5", "phi3, longrope"),
    "GLM-4.5": ("glm4moe", "glm4, moe"),
    "gpt-oss": ("gptoss", "gpt-oss"),
    "DeepSeek V3": ("deepseekv3", "deepseek-v3"),
    "DeepSeek R1 distilled": ("deepseek_r1_distill", "qwen2"),
    "Cohere (Aya)": ("cohere", "cohere"),
    "Cohere 2": ("cohere2", "cohere2"),
    "LFM2": ("lfm2", ""),
    "LFM2.5": ("lfm2_2_5_v2", ""),
    "Nemotron 3 Nano": ("nemotron_3_nano", ""),
    "Nemotron 3 Super": ("nemotron_3_super", ""),
    "Muse Glimmer": ("muse_glimmer", ""),
    "SmolVLM": ("smolvlm", ""),
    "Idefics 3": ("idefics3", ""),
    "LLaVA-NeXT": ("llava_next", ""),
    "Mistral": ("", "mistral, sliding"),
    "SmolLM3": ("", "smollm3"),
    "Granite 3": ("", "granite"),
    "OLMo 2": ("", "olmo2"),
    "Mixtral": ("", "mixtral"),
    "Phi-4-mini": ("", "phi3, partial"),
    "Pythia": ("", "gpt-neox"),
}
"""Family -> its template in TRL's package and its architecture; "" where the tests have none of it."""


def table() -> str:
    cells = [[family, *_row(*names)] for family, names in FAMILIES.items()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([HEADER, *rows])


def _row(template: str, architecture: str) -> list[str]:
    from architectures import ARCHITECTURES

    engine = f"`{ARCHITECTURES[architecture].engine}`" if architecture else "not tested"
    return [*_template_cells(template), engine]


def _template_cells(name: str) -> list[str]:
    from published_templates import published

    from toolwise.messages import Message

    if not name:
        return ["not tested"] * 5
    chat = published(name)
    prompt, opening = chat.tool_prompt, chat.render([Message(role="user", content="hm")]).rstrip()
    shown = {"template": "the template", "system": "the system message", "user": "the first user message"}
    texts = [*["calls as text"] * prompt.calls_as_text, *["results as user messages"] * prompt.results_from_user]
    thinking = "in the text" if "think" in chat.tokenizer.chat_template else "none"
    if opening.endswith("<think>"):
        thinking = "opened by the prompt"
    return [
        f"loads; stops at `{'`, `'.join(chat.turn_ends.stops)}`",
        shown[prompt.where],
        ", ".join(texts) or "as the template writes them",
        f"`{chat.detect_format().name}`",
        thinking,
    ]


def write(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
