"""Reopens the stream of messages that Gradio's client closed on an event which had just joined.

The server sends `close_stream` once a page has no event left. An event whose joining is answered before the client has
read that takes the stream for open, and then nothing reads its messages: its job never shows a step. Any event that
joins afterwards opens the stream again, on which the messages wait.
"""

import gradio as gr

from .handler_errors import reports_errors

REOPEN = "reopen-stream"
HEAD = """<script>
(() => {
  const plain = window.fetch;
  let open = 0, joined = false;  // streams, of which there is one at most, and whether an event has joined meanwhile
  const closed = () => {
    open -= 1;
    if (!joined) return;
    joined = false;
    // An event that is opening the stream itself does it within this time.
    setTimeout(() => { if (!open) document.getElementById("REOPEN")?.click(); }, 100);
  };
  window.fetch = async (input, options) => {
    const path = new URL(input.url ?? input, window.location).pathname;
    if (path.endsWith("/queue/data") && input.signal) {
      open += 1;
      input.signal.addEventListener("abort", closed, {once: true});
    }
    const response = await plain(input, options);
    if (path.endsWith("/queue/join") && open) joined = true;
    return response;
  };
})();
</script>""".replace("REOPEN", REOPEN)


def build() -> None:
    """Add the event that opens the stream: a button that nobody sees."""
    gr.Button(visible="hidden", elem_id=REOPEN).click(_nothing, None, None, show_progress="hidden")


@reports_errors()
def _nothing() -> None:
    """An event like any other for the stream."""
