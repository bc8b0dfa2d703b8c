"""One transcription of the decoder layer that Llama, Mistral, Qwen2 and Qwen3 share, for the engine and the learner.

It stands below both and imports neither. Each of them gives it its own attention: the engine over slots, the learner
over a pack's tree. A model that is not known here runs as transformers has it.

known.py         reads a layer's weights, or raises Unknown with the reason
maths.py         norm, rotary embedding, gate, a linear layer with its adapter; forward and backward
forward.py       the layer around its attention, and a whole model without gradients on it
merged.py        a whole model without gradients on a merged copy of the weights, for a CPU
layers.py        the layer as two autograd functions; other models' adapters, norms and gates as one each
shared_calls.py  which short attentions share a call
compare.py       how far from the model's own numbers these may be
"""
