// A chat that goes on from a message of the attempt, with the endpoint that the command was given.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Message } from "./contract";
import { post } from "./data";
import { Calls, roleClass } from "./message";
import { contentText, LongText } from "./text";

interface ChatProps {
  messages: Message[];
  onClose: () => void;
}

const CHAT_S = 300; // longest wait for a reply

export function Chat({ messages, onClose }: ChatProps) {
  const [added, setAdded] = useState<Message[]>([]);
  const [draft, setDraft] = useState("");
  const [isWaiting, setWaiting] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const field = useRef<HTMLTextAreaElement>(null);
  const ends = useRef(new AbortController());
  useEffect(() => {
    field.current?.focus();
    return () => ends.current.abort();
  }, []);
  const send = async () => {
    const asked: Message[] = draft.trim() === "" ? added : [...added, { role: "user", content: draft }];
    setAdded(asked);
    setDraft("");
    setWaiting(true);
    setError(null);
    try {
      const reply = await ask([...messages, ...asked], ends.current.signal);
      setAdded([...asked, reply]);
    } catch (failure) {
      setError(failure instanceof Error ? failure.message : String(failure));
    }
    setWaiting(false);
  };
  return (
    <section class="chat" aria-label="Chat">
      <div class="message-head">
        <h2>Chat from message {messages.length}</h2>
        <button type="button" class="quiet push" onClick={onClose}>
          close
        </button>
      </div>
      <div aria-live="polite">
        {added.map((message, place) => (
          <div key={place} class={`message ${roleClass(message.role)}`}>
            <span class="role">{message.role}</span>
            <LongText text={contentText(message.content)} />
            <Calls calls={message.tool_calls ?? []} />
          </div>
        ))}
        {isWaiting && <p class="soft">waiting for the reply {"\u2026"}</p>}
        {error !== null && <p class="failed">{error}</p>}
      </div>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (!isWaiting) void send();
        }}
      >
        <label>
          <span class="unseen">Your message</span>
          <textarea
            ref={field}
            rows={3}
            value={draft}
            placeholder="Write as the user, or leave empty to have the model reply to what stands"
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !isWaiting) void send();
            }}
          />
        </label>
        <button disabled={isWaiting}>Send</button>
      </form>
    </section>
  );
}

async function ask(messages: Message[], signal: AbortSignal): Promise<Message> {
  const { message } = await post<{ message?: Message }>("/api/chat", { messages }, CHAT_S, signal);
  if (message === undefined) throw new Error("the endpoint answered without a message");
  return message;
}
