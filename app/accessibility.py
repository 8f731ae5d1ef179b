"""What Gradio's own components lack for screen readers, added in the browser."""

HEAD = """<script>
(() => {
  const add = () => {
    // An output without an image has a label, but no role that could have one.
    document.querySelectorAll("div.empty[aria-label]:not([role])").forEach((each) => each.setAttribute("role", "img"));
    // An image is in a button without a name; the label of its block is one.
    document.querySelectorAll(".image-container > button:not([aria-label])").forEach((each) => {
      const label = each.closest(".block")?.querySelector("label")?.textContent.trim();
      each.setAttribute("aria-label", label || "Image");
    });
  };
  let isDue = false;
  new MutationObserver(() => {  // which each step of a job calls often, while the workers compute
    if (isDue) return;
    isDue = true;
    setTimeout(() => { isDue = false; add(); }, 200);
  }).observe(document.documentElement, {childList: true, subtree: true});
})();
</script>"""
