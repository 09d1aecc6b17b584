// Opened from a disk (file://), a page may not start a worker: the search then runs in a hidden frame.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        // In a worker, postMessage sends to the page.
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
        inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(inside, each)), Promise.resolve());
        load(inside, url).then(resolve);
      });
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data: this.inside.structuredClone(data) })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
  const load = (inside, url) => new Promise((resolve) => {
    const script = inside.document.createElement("script");
    script.src = url;
    script.onload = resolve;
    inside.document.head.append(script);
  });
}
