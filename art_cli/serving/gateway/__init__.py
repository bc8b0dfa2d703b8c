"""`art gateway`: the standalone capturing gateway, in front of an endpoint or a checkpoint.

    redaction.py           Redactor: replaces keys and matches of the user's rules before anything is written
    entries.py             JournalEntry: a recorded call as a journal line
    journaled_recorder.py  JournaledRecorder: a Recorder that writes each call to the journal first;
                           trajectory and group from a conversation's entries
    journal.py             Journal: the directory's files; turns journals into trajectory files; survives any kill
    reply_index.py         ReplyIndex: the conversation of each reply, for feedback that comes days later
    feedback_service.py    FeedbackService: /v1/feedback; FeedbackLog: feedback.jsonl
    conversations.py       Conversations: assigns calls to conversations and ends conversations
    client_names.py        name_clients: "key 1", "key 2", ..., each for one key forever
    gateway_service.py     GatewayService: everything on a port, from the first call to the last file
                           Clients: API keys, with the client and conversation named by a key
                           ClientBackend: answers a client's calls, and returns once they are on disk

A call passes: middleware -> application (chat/chat_app.py) -> backend -> conversation -> rollouts/rollout_gateway.py ->
engine.
"""
