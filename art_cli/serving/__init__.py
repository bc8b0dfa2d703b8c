"""Models in production: `art serve`, `art gateway` and `art export`.

A request passes: middleware -> application (chat/chat_app.py) -> dispatch -> engine.
"""
