// Commands: each asks first, says what it will do, and tells what came of it.
"use strict";

(() => {
  const dialog = document.getElementById("command");
  const form = dialog.querySelector("form");
  const told = dialog.querySelector(".told");
  const confirm = form.querySelector("[type=submit]");
  const said = document.getElementById("said");
  let wish = null;

  function ask(button) {
    wish = { button, path: button.dataset.post, body: JSON.parse(button.dataset.body || "{}") };
    dialog.querySelector("h2").textContent = button.dataset.title;
    dialog.querySelector(".text").textContent = button.dataset.text;
    for (const field of dialog.querySelectorAll("[data-field]")) {
      field.hidden = button.dataset.asks !== "freeze";
      field.querySelector("input, select").disabled = field.hidden;
    }
    confirm.textContent = button.textContent.replace(" …", "");
    confirm.disabled = false;
    told.textContent = "";
    dialog.showModal();
  }

  async function send() {
    const fields = Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
    confirm.disabled = true;
    told.textContent = "…";
    try {
      const answer = await fetch(wish.path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ...wish.body, ...fields }),
        signal: AbortSignal.timeout(60000),
      });
      if (answer.status === 401) return location.assign("login");
      const document_ = await answer.json();
      if (!answer.ok) throw new Error(message(document_));
      const late = unfinished(document_);
      if (late) throw new Error(late);
      dialog.close();
      said.textContent = `Done: ${confirm.textContent}`;
      document.dispatchEvent(new Event("tiertune-renew"));
    } catch (error) {
      told.textContent = error.name === "TimeoutError" ? "The agent has not answered yet; look again in a moment." : error.message;
      confirm.disabled = false;
    }
  }

  // What was taken, and has not happened everywhere yet.
  function unfinished(answer) {
    const stores = Object.entries(answer.stores || {}).filter(([, outcome]) => outcome !== "ok");
    if (stores.length) return `${stores.map(([name, why]) => `${name}: ${why}`).join("; ")}. These are told again every window.`;
    if (wish.path.endsWith("/rollback") && answer.state !== "rolled_back") return "It is being rolled back: the store has not answered yet.";
    if (wish.path.endsWith("/approve") && !["approved", "applied", "soaking"].includes(answer.state)) return `It is ${answer.state}: ${answer.reason}`;
    return "";
  }

  function message(answer) {
    if (Array.isArray(answer.detail)) return answer.detail.map((one) => one.msg).join("; ");
    return answer.detail || "The agent refused.";
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-post]");
    if (button) ask(button);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (wish.button.isConnected) return;
    const button = document.querySelector(`button[data-post="${CSS.escape(wish.path)}"]`);
    if (button) button.focus(); // the one that asked was exchanged meanwhile
  });
})();
