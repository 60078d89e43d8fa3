// Renews the figures in place: only sections that changed, keeping what the reader opened, focused or selected.
"use strict";

(() => {
  const live = document.getElementById("live");
  const stale = document.getElementById("stale");
  const said = document.getElementById("said");
  const every = Number(live.dataset.refresh) * 1000;
  const shown = new Map();

  const key = (section) => section.id;
  for (const section of live.children) shown.set(key(section), section.innerHTML);

  function reading(section) {
    const selection = document.getSelection();
    return selection && !selection.isCollapsed && section.contains(selection.anchorNode);
  }

  function keepOpen(before, after) {
    for (const open of before.querySelectorAll("details[open][id]")) {
      const same = after.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = true;
    }
  }

  // Where the focus is within a section, as a path of positions, so that it survives the exchange.
  function focusPath(section) {
    const path = [];
    for (let node = document.activeElement; node && node !== section; node = node.parentElement) {
      if (!node.parentElement) return null;
      path.unshift([...node.parentElement.children].indexOf(node));
    }
    return section.contains(document.activeElement) ? path : null;
  }

  function focusable(section, held) {
    if (held.details) return section.querySelector(`#${CSS.escape(held.details)} > summary`);
    return held.path.reduce((node, place) => node && node.children[place], section);
  }

  function exchange(before, after) {
    const path = focusPath(before);
    const active = document.activeElement;
    const details = path && active.tagName === "SUMMARY" ? active.parentElement.id : "";
    keepOpen(before, after);
    before.replaceWith(after);
    if (path) {
      const next = focusable(after, { details, path });
      if (next) next.focus({ preventScroll: true });
    }
  }

  // Screen readers hear the sentences at the top again only when they say something else.
  const sentences = () => [...live.querySelectorAll("h1, .more")].map((part) => part.textContent).join(" ");
  function say(before) {
    const now = sentences();
    if (now !== before) said.textContent = now;
  }

  function renew(html) {
    const before = sentences();
    const fresh = [...new DOMParser().parseFromString(html, "text/html").body.children];
    const wanted = new Set(fresh.map(key));
    for (const old of [...live.children]) if (!wanted.has(key(old))) old.remove();
    fresh.forEach((section, place) => {
      const text = section.innerHTML;
      const old = document.getElementById(key(section));
      if (!old) live.insertBefore(document.adoptNode(section), live.children[place] || null);
      else if (old.className !== section.className || shown.get(key(section)) !== text) {
        if (reading(old)) return;
        exchange(old, document.adoptNode(section));
      }
      shown.set(key(section), text);
    });
    say(before);
  }

  async function look() {
    if (!document.hidden) {
      try {
        const answer = await fetch("/live", { cache: "no-store", signal: AbortSignal.timeout(10000) });
        if (answer.status === 401 || answer.redirected) return location.assign("/login");
        if (!answer.ok) throw new Error(String(answer.status));
        renew(await answer.text());
        stale.hidden = true;
      } catch {
        stale.hidden = false;
      }
    }
    clearTimeout(timer); // a command may have set one meanwhile
    timer = setTimeout(look, every);
  }

  let timer = setTimeout(look, every);
  document.addEventListener("tiertune-renew", () => {
    clearTimeout(timer);
    timer = setTimeout(look, 1000); // a look is shared by readers for a second
  });
})();
