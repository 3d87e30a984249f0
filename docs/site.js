// Material leaves the dialog of its search without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");

// What scrolls sideways can be reached by keyboard: Material wraps wide tables, but gives the wrappers no focus.
window.addEventListener("load", () => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap, .highlight-ipynb")) {
    if (wrap.scrollWidth > wrap.clientWidth) wrap.tabIndex = 0;
  }
});
