"""One transcription of the decoder layer common to Llama, Mistral, Qwen2 and Qwen3, for engine and learner.

It imports neither. Each supplies its own attention: the engine over slots, the learner over a pack's tree. Unknown
models run on transformers' own layers.
"""
