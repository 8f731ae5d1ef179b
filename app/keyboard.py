"""Ctrl-enter starts the run of the tab that is shown, wherever the cursor is; Gradio's boxes have shift-enter only."""

HEAD = """<script>
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  const inSight = [...document.querySelectorAll("button.primary.lg")].find((each) => each.offsetParent !== null);
  if (!inSight) return;
  event.preventDefault();
  inSight.click();  // does nothing while a job runs, since the button is disabled then
});
</script>"""
