"""One transcription of the decoder layer common to Llama, Mistral, Qwen2 and Qwen3, for engine and learner.

It imports neither. Each supplies its own attention: the engine over slots, the learner over a pack's tree. Unknown
models run on transformers' own layers.

maths.py    norm, rotary embedding, gate, linear layer with adapter; products; attentions in a joint call
forward.py  known layers; whole models without gradients, also on merged weights; bounds on their gap
layers.py   the layer as two autograd functions; adapters, norms and gates in other models as one each
"""
