// The search in pages that are opened from disk: a browser starts no Worker there, so the script of
// the search runs in a hidden frame of the page. Over http this file does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, document.baseURI);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      const load = (source) =>
        new Promise((done) => {
          const script = inner.document.createElement("script");
          script.src = new URL(source, base);
          script.onload = script.onerror = done;
          inner.document.body.append(script);
        });
      inner.IFrameWorker = window.Worker;
      inner.importScripts = (...sources) => Promise.all(sources.map(load));
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(base);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
