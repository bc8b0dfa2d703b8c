"""GGUF exports for llama.cpp and Ollama: the policy as a file, the proof that it equals the policy, and a Modelfile.

The adapter is merged into the base in float32, and each tensor is rounded once. transformers then reads the file back.
The file and the float32 policy score the policy's saved prompts token by token, and both tokenizers encode their text.
If logprobs differ by more than the bound, or tokens differ, the export is deleted. `--gguf-adapter` writes only the
adapter, which llama.cpp adds to a GGUF file of the base.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.models import gguf_base, gguf_file
from art_cli.models.adapters import merge
from art_cli.runs.durable import new_directory
from art_cli.runtime.errors import DriftError, UsageError
from art_cli.runtime.scratch import scratch
from art_cli.serving import merged_export
from art_cli.serving.merged_export import Exported, load_source, logprobs
from art_cli.serving.served_model import Source

# Largest logprob difference from float32 per token, measured like merged_export.BOUNDS. The bounds are several times
# the largest differences found by benchmarks/serving/gguf.py: rounding passes, and errors are detected.
BOUNDS = {"f16": 5e-2, "q8_0": 1.0, "q4_0": 8.0}


def export(source: Source, output: Path, *, kind: str, bound: float | None) -> Exported:
    """Writes the GGUF file, a Modelfile and the model card to `output`.

    Raises UsageError for unknown kinds and models that GGUF cannot store, and if `output` exists; DriftError
    if the written model differs from the policy.
    """
    if kind not in BOUNDS:
        raise UsageError(f"--gguf {kind}: one of {', '.join(BOUNDS)}")
    if output.exists():
        raise UsageError(f"{output}: there is something already; choose another name")
    policy = load_source(source, "float32")
    gguf_file.architecture_of(policy.model.config)
    prompts = merged_export.prompts_for(source, policy)
    wanted = logprobs(policy, prompts)
    with new_directory(output, is_private=False) as directory:
        file = directory / f"{file_name(source.name)}-{kind}.gguf"
        merged = merge(policy)
        tokenizer = merged.tokenizer
        gguf_file.write_model(file, merged.model, tokenizer, kind=kind, name=source.name)
        del policy, merged  # a GPU may not hold the written model as well
        with scratch("gguf") as temporary:
            (temporary / "read").mkdir()
            gguf_base.convert(file, temporary / "read")
            read = merged_export.load_written(source, temporary / "read", "float32")
            most = BOUNDS[kind] if bound is None else bound
            exported = merged_export.compare(output, wanted, logprobs(read, prompts), most)
            for text in map(tokenizer.decode, prompts):
                if tokenizer(text).input_ids != read.tokenizer(text).input_ids:
                    raise DriftError(f"not written: the file's tokenizer reads a prompt differently: {text[:60]!r}")
        (directory / "Modelfile").write_text(modelfile(f"FROM ./{file.name}", tokenizer), encoding="utf-8")
        merged_export.write_card(directory, source, exported, kind)
    return exported


def export_adapter(source: Source, output: Path) -> Path:
    """Writes the adapter as GGUF with a Modelfile, and returns the file. Raises UsageError."""
    if source.adapter is None:
        raise UsageError(f"--gguf-adapter: {source.name} is a whole model; --gguf writes it")
    if output.exists():
        raise UsageError(f"{output}: there is something already; choose another name")
    policy = load_source(source, "float32")
    name = f"{file_name(source.name)}-adapter.gguf"
    with new_directory(output, is_private=False) as directory:
        gguf_file.write_adapter(directory / name, source.adapter, policy.model.config)
        text = modelfile(f"FROM ./base.gguf\nADAPTER ./{name}", policy.tokenizer)
        note = "# base.gguf: the base model as a GGUF file, for example art export BASE -o DIR --gguf f16\n"
        (directory / "Modelfile").write_text(note + text, encoding="utf-8")
    return output / name


def file_name(name: str) -> str:
    """Replaces characters that may be invalid in a file name or Modelfile by "-"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


class _Form(NamedTuple):
    """A chat format: its Ollama template, and its rendering of a message and a reply's beginning."""

    message: str
    reply: str
    reply_role: str
    template: str


CHATML = _Form(
    "<|im_start|>{role}\n{content}<|im_end|>\n",
    "<|im_start|>assistant\n",
    "assistant",
    "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
)
GEMMA = _Form(
    "<start_of_turn>{role}\n{content}<end_of_turn>\n",
    "<start_of_turn>model\n",
    "model",
    '{{ range .Messages }}<start_of_turn>{{ if eq .Role "assistant" }}model{{ else }}{{ .Role }}{{ end }}\n'
    "{{ .Content }}<end_of_turn>\n{{ end }}<start_of_turn>model\n",
)
LLAMA3 = _Form(
    "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "assistant",
    "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)


def modelfile(first: str, tokenizer: Any) -> str:
    """Returns a Modelfile for `ollama create`. Known chat templates get a TEMPLATE."""
    form = next((form for form in (CHATML, GEMMA, LLAMA3) if _writes(form, tokenizer)), None)
    lines = [first]
    if form is not None:
        lines.append(f'TEMPLATE """{form.template}"""')
    else:
        lines.append("# no TEMPLATE: the chat template is unknown; Ollama looks into the file for it")
    if tokenizer.eos_token:
        lines.append(f'PARAMETER stop "{tokenizer.eos_token}"')
    return "\n".join(lines) + "\n"


def _writes(form: _Form, tokenizer: Any) -> bool:
    """Returns True if the tokenizer's chat template renders conversations without tools in this format."""
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": f"text {index}"} for index, role in enumerate(roles)]
    system = [{"role": "system", "content": "text"}]
    for asked in (messages, system + messages):  # a template may add a default system message
        try:
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may raise anything for unsupported roles
            continue
        names = {"assistant": form.reply_role}
        wanted = "".join(
            form.message.format(role=names.get(each["role"], each["role"]), content=each["content"]) for each in asked
        )
        if text.removeprefix(tokenizer.bos_token or "") == wanted + form.reply:
            return True
    return False
