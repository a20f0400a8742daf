// Browsers start no worker from a file: URL. A page that is opened from the disk runs the search's worker in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.addEventListener("load", () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(message => this.postMessage(message))
      })
      window.iframeWorkers = [...(window.iframeWorkers || []), this]
      const number = window.iframeWorkers.length - 1
      // In a frame postMessage is the frame's own; the worker means its page. Scripts load in turn, as importScripts does.
      const inFrame = `
        self.postMessage = message => parent.iframeWorkers[${number}].receive(message)
        self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.body.appendChild(script)
        })), Promise.resolve())`
      this.frame.srcdoc = `<body><script>${inFrame}<\/script><script src="${url}"><\/script></body>`
      document.body.appendChild(this.frame)
    }
    postMessage(message) {
      if (this.waiting) this.waiting.push(message)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: message }))
    }
    receive(message) {
      this.dispatchEvent(new MessageEvent("message", { data: message }))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
