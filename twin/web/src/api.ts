// The API: requests with the token of this tab, and the stream of updates.

export const BASE = "api/v1";
const KEY = "racktwin.token";

export class ApiError extends Error {
  constructor(message: string, readonly status: number) {
    super(message);
  }
}

let token = "";

export function readToken(): boolean {
  const given = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (given) {
    sessionStorage.setItem(KEY, given[1]);
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem(KEY) ?? "";
  return token !== "";
}

export function keepToken(text: string): void {
  token = text;
  sessionStorage.setItem(KEY, text);
}

export function dropToken(): void {
  token = "";
  sessionStorage.removeItem(KEY);
}

type Json = Record<string, any>;
let refused: (why: string) => void = () => {};

export function onRefused(f: (why: string) => void): void {
  refused = f;
}

async function ask(method: string, path: string, body?: unknown, more: Record<string, string> = {}): Promise<Response> {
  const headers: Record<string, string> = { Authorization: `Bearer ${token}`, ...more };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(`${BASE}/${path}`, {
      method, headers, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError("the daemon does not answer", 0);
  }
  if (!response.ok) {
    const said = await response.json().catch(() => ({}));
    if (response.status === 401) refused(said.error ?? "the token is not accepted");
    throw new ApiError(said.error ?? response.statusText, response.status);
  }
  return response;
}

export async function get<T = Json>(path: string): Promise<T> {
  return (await ask("GET", path)).json();
}

// An action is carried out once, even if the answer was lost and it is sent again.
export async function act<T = Json>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T> {
  const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
  return (await ask(method, path, method === "POST" ? body ?? {} : undefined, { "Idempotency-Key": key })).json();
}

export const part = (name: string): string => name.split("/").map(encodeURIComponent).join("/");

// One connection of the stream, until it ends. Raises ApiError.
export async function follow(
  last: string, each: (kind: string, data: any, id: string) => void, beat: () => void, signal: AbortSignal,
): Promise<void> {
  const headers: Record<string, string> = { Authorization: `Bearer ${token}` };
  if (last) headers["Last-Event-ID"] = last;
  const response = await fetch(`${BASE}/events`, { headers, cache: "no-store", signal });
  if (!response.ok || !response.body) {
    const said = await response.json().catch(() => ({}));
    throw new ApiError(said.error ?? response.statusText, response.status);
  }
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    beat();
    text += decoder.decode(value, { stream: true });
    let at: number;
    while ((at = text.indexOf("\n\n")) >= 0) {
      let kind = "message", data = "", id = "";
      for (const line of text.slice(0, at).split("\n")) {
        if (line.startsWith("id: ")) id = line.slice(4);
        else if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      text = text.slice(at + 2);
      if (data) each(kind, JSON.parse(data), id);
    }
  }
}
