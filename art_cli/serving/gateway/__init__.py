"""`art gateway`: the capturing gateway alone, for days, in front of an endpoint or a checkpoint.

    redaction.py           Redactor: replaces keys, and what the user's rules match, before anything is written
    entries.py             JournalEntry: one recorded call as a line of the journal, and back
    journaled_recorder.py  JournaledRecorder: a Recorder that writes each call to the journal before it takes it;
                           trajectory and group of a conversation's entries
    journal.py             Journal: the directory's files; journals become files of trajectories, and survive any kill
    conversations.py       Conversations: which one a call belongs to, and when one is over
    gateway_service.py     GatewayService: all of it on a port, from the first call to the last file
                           Clients: the API keys, and the client and conversation that a key names
                           ClientBackend: answers one client's calls, and returns once they are on the disk

A call goes: middleware -> application (chat/chat_app.py) -> backend -> conversation -> rollouts/rollout_gateway.py ->
engine.
"""
