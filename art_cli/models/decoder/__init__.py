"""One transcription of the decoder layer that Llama, Mistral, Qwen2 and Qwen3 share, for the engine and the learner.

It stands below both and imports neither. Each of them gives it its own attention: the engine over slots, the learner
over a pack's tree. A model that is not known here runs as transformers has it.

maths.py    norm, rotary embedding, gate, a linear layer with its adapter; products; attentions that share a call
forward.py  known layers, whole models without gradients on them, also on merged weights, and bounds on their gap
layers.py   the layer as two autograd functions; other models' adapters, norms and gates as one each
"""
