"""Shows at once that the click that starts a run was received: the server's first message may come with its first step.

Without an event of Gradio, for which the browser would update components while the ranks compute.
"""

from .job_updates import BEGIN_SECONDS

HEAD = """<script>
document.addEventListener("click", (event) => {
  const start = event.target.closest?.("button.primary.lg");
  if (!start || start.disabled) return;
  start.classList.add("sent");
  setTimeout(() => start.classList.remove("sent"), MILLISECONDS);
});
</script>""".replace("MILLISECONDS", f"{1000 * BEGIN_SECONDS + 50:.0f}")
