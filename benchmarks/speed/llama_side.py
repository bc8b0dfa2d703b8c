"""A program for a Python that has llama-cpp-python: llama.cpp as a side of benchmarks/speed/sampling_real.py.

    PYTHON benchmarks/speed/llama_side.py FILE.gguf THREADS          # JSON lines in and out

{"prompts": [[ids], ...], "num": 60} answers with as many new tokens of each prompt, sampled at temperature 1. The
prompts have one length. They are computed in one batch; equal ones are computed once and their cells copied. What was
computed is kept for the next turn, whose prompts begin with these and the answers. {} forgets it.
"""

import ctypes
import json
import sys

import llama_cpp  # type: ignore[import-not-found]

# One buffer for all sequences (kv_unified), where a copied prompt costs nothing: with a buffer for each, 64 attempts at
# one prompt gave 73 tokens per processor second instead of 113, and eight conversations 16 instead of 18.
NUM_SEQUENCES, CELLS = 64, 8192
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Sequences:
    """A context with one batch of sequences of equal length, of which `held` tokens each are in its memory."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch, params.kv_unified = NUM_SEQUENCES, CELLS, CELLS, True
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context is not None, file
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(CELLS, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_dist(1)
        self.held = 0

    def sample(self, prompts: list[list[int]], num: int) -> list[list[int]]:
        owners = list(range(len(prompts))) if self.held else [prompts.index(ids) for ids in prompts]
        rows = self._compute({owner: prompts[owner][self.held :] for owner in owners}, self.held)
        for index, owner in enumerate(owners):
            if index != owner:
                llama_cpp.llama_memory_seq_cp(self._memory, owner, index, -1, -1)
        self.held = len(prompts[0])
        made = [[self._token(rows[owner])] for owner in owners]
        for _ in range(num - 1):
            rows = self._compute({index: ids[-1:] for index, ids in enumerate(made)}, self.held)
            self.held += 1
            for index, ids in enumerate(made):
                ids.append(self._token(rows[index]))
        return made

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self.held = 0

    def _compute(self, tokens: dict[int, list[int]], position: int) -> dict[int, int]:
        """Computes the tokens of each sequence from a position on, and returns the index of its last token's row."""
        batch, rows, at = self._batch, {}, 0
        for sequence, ids in tokens.items():
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(ids) - 1
                at += 1
            rows[sequence] = at - 1
        batch.n_tokens = at
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, status
        return rows

    def _token(self, row: int) -> int:
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, row))


if __name__ == "__main__":
    sequences = Sequences(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        answer = sequences.sample(**asked) if asked else None
        if not asked:
            sequences.forget()
        print(json.dumps(answer), flush=True)
