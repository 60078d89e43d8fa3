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

  // Opens what is open; returns what is to be scrolled, and how far, once it is laid out.
  function keepOpen(before, after) {
    const scrolled = [];
    for (const open of before.querySelectorAll("details[open][id]")) {
      const same = after.querySelector(`#${CSS.escape(open.id)}`);
      if (!same) continue;
      same.open = true;
      const tables = same.querySelectorAll(".scroll");
      open.querySelectorAll(".scroll").forEach((one, place) => {
        if (one.scrollLeft && tables[place]) scrolled.push([tables[place], one.scrollLeft]);
      });
    }
    return scrolled;
  }

  // Where the focus is: the nearest id around it, as what is new moves all places but not that, and the way from there.
  function focusPath(section) {
    if (!section.contains(document.activeElement)) return null;
    const path = [];
    let node = document.activeElement;
    for (; !node.id; node = node.parentElement) path.unshift([...node.parentElement.children].indexOf(node));
    return { id: node.id, path };
  }

  function exchange(before, after) {
    const held = focusPath(before);
    const scrolled = keepOpen(before, after);
    before.replaceWith(after);
    for (const [one, left] of scrolled) one.scrollLeft = left;
    if (held) {
      const next = held.path.reduce((node, place) => node && node.children[place], document.getElementById(held.id));
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
        const answer = await fetch("live", { cache: "no-store", signal: AbortSignal.timeout(10000) });
        if (answer.status === 401 || answer.redirected) return location.assign("login");
        if (!answer.ok) throw new Error(`answers ${answer.status}: see its log`);
        renew(await answer.text());
        stale.hidden = true;
      } catch (error) {
        const what = error.name === "Error" ? error.message : "does not answer";
        const measured = live.querySelector("#now time"); // by the agent's clock, as the reader's may be wrong
        const since = measured ? ` These figures are of ${measured.textContent} UTC.` : "";
        const told = `The agent ${what}; trying again.${since}`;
        if (stale.textContent !== told) stale.textContent = told;
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
