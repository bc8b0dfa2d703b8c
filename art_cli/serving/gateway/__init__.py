"""`art gateway`: the standalone capturing gateway, in front of an endpoint or a checkpoint.

A call passes: middleware -> application (chat/chat_app.py) -> backend -> conversation -> rollouts/rollout_gateway.py ->
engine.
"""
