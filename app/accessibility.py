"""What Gradio's own components lack for screen readers, added in the browser."""

HEAD = """<script>
(() => {
  // An output without an image has a label, but no role that could have one.
  const add = () => document.querySelectorAll("div.empty[aria-label]:not([role])")
    .forEach((each) => each.setAttribute("role", "img"));
  new MutationObserver(add).observe(document.documentElement, {childList: true, subtree: true});
})();
</script>"""
