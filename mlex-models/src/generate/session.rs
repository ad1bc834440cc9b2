//! A model on a thread of its own, usable from any thread.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mlex_core::{Device, Dtype, Stream};

use super::engine::{self, Guessers, Sink, TextParts};
use super::prompt_cache::{
    self, PromptCache, PromptCacheLimits, PromptCacheStats, PromptFileInfo, PromptJob,
};
use super::request::{Event, Request};
use super::score::{self, Score};
use crate::files::ModelFiles;
use crate::fingerprint::fingerprint;
use crate::load::{LoadedModel, load, load_mtp};
use crate::media::{MediaEngine, Placeholders};
use crate::model::{ModelInfo, MtpHead};
use crate::text::{OutputFormat, Tokenizer};
use crate::towers::{MediaKind, media_kinds};
use crate::{Error, ErrorKind, Result};

pub use crate::load::LoadProgress;

/// How a session loads its model.
#[derive(Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Floating-point tensors become this; otherwise they stay as the files have them.
    pub dtype: Option<Dtype>,
    /// What computes; otherwise the [preferred device](Device::preferred).
    pub device: Option<Device>,
    /// How many states of prompts are held, so that a prompt that begins alike starts later.
    pub prompt_cache: PromptCacheLimits,
    /// A smaller model with the same tokens, whose guesses can speed generations up
    /// ([`Guesses::Draft`](super::Guesses::Draft)).
    pub draft_model: Option<PathBuf>,
    /// Loads the model's own head for further tokens too, for
    /// [`Guesses::Mtp`](super::Guesses::Mtp).
    pub mtp: bool,
    /// Called, on the model's thread, after each tensor.
    pub on_progress: Option<Box<dyn FnMut(LoadProgress) + Send>>,
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("dtype", &self.dtype)
            .field("device", &self.device)
            .field("prompt_cache", &self.prompt_cache)
            .field("draft_model", &self.draft_model)
            .field("mtp", &self.mtp)
            .finish_non_exhaustive()
    }
}

/// What a session's model is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// The model.
    pub model: ModelInfo,
    /// The bytes of its tensors as the files have them.
    pub file_bytes: u64,
    /// How long loading it took.
    pub load_time: Duration,
    /// What computes.
    pub device: Device,
    /// What it takes beside text.
    pub media: Vec<MediaKind>,
    /// The model that guesses tokens for it.
    pub draft_model: Option<ModelInfo>,
    /// The repetition penalty that the model is made for, if it is: that of generation_config.json,
    /// or the architecture's own. A request has none unless it is put there.
    pub repetition_penalty: Option<f32>,
    /// Whether the model has other ways of decoding than token after token.
    pub fills_blocks: bool,
}

enum Job {
    Generate {
        request: Box<Request>,
        events: Sender<Result<Event>>,
        cancelled: Arc<AtomicBool>,
    },
    Score {
        tokens: Vec<u32>,
        top: usize,
        reply: Sender<Result<Score>>,
    },
    Prompts(PromptJob),
}

/// A loaded model. A clone talks to the same model, whose thread ends with the last of them;
/// dropping the last one waits for that.
///
/// ```no_run
/// use mlex_models::generate::{LoadOptions, Request, Session};
/// use mlex_models::text::Part;
///
/// let session = Session::load("model", LoadOptions::default())?;
/// for event in session.generate(Request::chat("What is the capital of France?")) {
///     for part in event?.parts() {
///         if let Part::Text(text) = part {
///             print!("{text}");
///         }
///     }
/// }
/// # Ok::<(), mlex_models::Error>(())
/// ```
#[derive(Clone)]
pub struct Session {
    engine: Arc<Engine>,
}

/// The thread of a model. It ends, and is waited for, when the last session and generation
/// that use it are gone.
struct Engine {
    /// Taken when the engine is dropped, which ends the thread's loop.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    text: Arc<TextParts>,
    info: SessionInfo,
}

impl Engine {
    /// Gives the thread a job. When the thread has ended, so has the job's channel: whoever
    /// waits at its other end sees that.
    fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("info", &self.engine.info)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Loads the model at `path`, a directory or a GGUF file, on a new thread.
    ///
    /// # Errors
    /// When a file is missing or wrong; the error names it and the field or tensor.
    pub fn load(path: impl AsRef<Path>, options: LoadOptions) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let (jobs, inbox) = channel();
        let (ready, loaded) = channel();
        let run = move || {
            let start = Instant::now();
            let mut pool = PromptCache::new(options.prompt_cache.clone());
            // What the states of this model in files are told by.
            let dtype = options.dtype;
            let identity = path.clone();
            let identity = move || {
                let files = fingerprint(&identity)?;
                Ok(match dtype {
                    Some(dtype) => format!("{files}-{dtype}"),
                    None => files,
                })
            };
            match open(&path, options) {
                Ok(Opened {
                    model,
                    draft,
                    mtp,
                    mut media,
                    text,
                    device,
                }) => {
                    let info = SessionInfo {
                        model: model.model.info().clone(),
                        file_bytes: model.file_bytes,
                        load_time: start.elapsed(),
                        device,
                        media: text.kinds.clone(),
                        draft_model: draft.as_ref().map(|draft| draft.model.info().clone()),
                        repetition_penalty: model.model.repetition_penalty(),
                        fills_blocks: model.model.blocks().is_some(),
                    };
                    let text = Arc::new(text);
                    // Nobody waits any more when this fails; then there are no jobs either.
                    let _ = ready.send(Ok((Arc::clone(&text), info)));
                    let guessers = Guessers {
                        draft: draft.as_ref().map(|draft| &*draft.model),
                        mtp: mtp.as_deref(),
                    };
                    serve(
                        &model, guessers, &mut media, &text, &mut pool, &identity, &inbox,
                    );
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        };
        let thread = thread::Builder::new()
            .name("mlex-model".to_owned())
            .spawn(run)?;
        let (text, info) = loaded.recv().map_err(|_| gone())??;
        let engine = Engine {
            jobs: Some(jobs),
            thread: Some(thread),
            text,
            info,
        };
        Ok(Self {
            engine: Arc::new(engine),
        })
    }

    /// What the model is.
    pub fn info(&self) -> &SessionInfo {
        &self.engine.info
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.engine.text.tokenizer
    }

    /// Whether the model has a chat template, which [`Prompt::Messages`] needs.
    ///
    /// [`Prompt::Messages`]: super::Prompt::Messages
    pub fn has_chat_template(&self) -> bool {
        self.engine.text.chat_template.is_some()
    }

    /// How the model marks reasoning and tool calls.
    pub fn output_format(&self) -> &OutputFormat {
        &self.engine.text.format
    }

    /// The prompt of a request as the model will be given it. Its media are read and prepared
    /// for that, on the calling thread; neither a tower nor the model runs.
    ///
    /// # Errors
    /// When the chat template or the tokenizer refuses it, or a medium cannot be used.
    pub fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>> {
        self.engine.text.prompt_tokens(request)
    }

    /// Starts a generation, whose events can be read as they come. Several wait for each other.
    pub fn generate(&self, request: Request) -> Generation {
        let (events, inbox) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let choices = request.choices.max(1);
        let job = Job::Generate {
            request: Box::new(request),
            events,
            cancelled: Arc::clone(&cancelled),
        };
        self.engine.submit(job);
        Generation {
            events: inbox,
            cancelled,
            state: State::Running,
            choices,
            engine: Arc::clone(&self.engine),
        }
    }

    /// What the prompt cache holds.
    ///
    /// # Errors
    /// When the model's thread has ended.
    pub fn prompt_cache(&self) -> Result<PromptCacheStats> {
        let (reply, answer) = channel();
        self.engine.submit(Job::Prompts(PromptJob::Stats(reply)));
        answer.recv().map_err(|_| gone())
    }

    /// Gives up all states of the prompt cache.
    pub fn clear_prompt_cache(&self) {
        self.engine.submit(Job::Prompts(PromptJob::Clear));
    }

    /// Computes the prompt of `request` and writes its state to a file, for
    /// [`load_prompt`](Self::load_prompt).
    ///
    /// # Errors
    /// When the prompt is refused, MLX fails, or the file cannot be written.
    pub fn save_prompt(&self, request: Request, path: impl AsRef<Path>) -> Result<PromptFileInfo> {
        let (reply, answer) = channel();
        self.engine.submit(Job::Prompts(PromptJob::Save {
            request: Box::new(request),
            path: path.as_ref().to_path_buf(),
            reply,
        }));
        answer.recv().map_err(|_| gone())?
    }

    /// Adds the state of a prompt from a file to the prompt cache.
    ///
    /// # Errors
    /// When the file is no such state, or one of another model.
    pub fn load_prompt(&self, path: impl AsRef<Path>) -> Result<PromptFileInfo> {
        let (reply, answer) = channel();
        let path = path.as_ref().to_path_buf();
        self.engine
            .submit(Job::Prompts(PromptJob::Load { path, reply }));
        answer.recv().map_err(|_| gone())?
    }

    /// The log-probabilities of `tokens`, with the `top` likeliest at each position.
    ///
    /// # Errors
    /// When there are no tokens, one is outside of the vocabulary, or MLX fails.
    pub fn score(&self, tokens: &[u32], top: usize) -> Result<Score> {
        let (reply, answer) = channel();
        self.engine.submit(Job::Score {
            tokens: tokens.to_vec(),
            top,
            reply,
        });
        answer.recv().map_err(|_| gone())?
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::EngineGone)
}

/// What a session's thread owns.
struct Opened {
    model: LoadedModel,
    draft: Option<LoadedModel>,
    mtp: Option<Box<dyn MtpHead>>,
    media: MediaEngine,
    text: TextParts,
    device: Device,
}

/// Loads everything, on the model's thread.
fn open(path: &Path, options: LoadOptions) -> Result<Opened> {
    let device = match options.device {
        Some(device) => device,
        None => Device::preferred()?,
    };
    Stream::default_of(device)?.set_current();
    let files = ModelFiles::open(path)?;
    // The small files first, so that a broken one is seen before the long load.
    let tokenizer = files.tokenizer()?;
    let chat_template = files
        .chat_template()?
        .map(|template| template.with_variables(tokenizer.special_tokens()));
    let config = files.config()?;
    let eos_ids = config.eos_token_ids();
    let mut eos_ids = eos_ids.map_err(|error| files.locate(error))?;
    eos_ids.extend(tokenizer.eos_ids());
    eos_ids.sort_unstable();
    eos_ids.dedup();
    let kinds = media_kinds(&files).map_err(|error| files.locate(error))?;
    let placeholders = Placeholders::new(&config, &kinds, &tokenizer);
    let placeholders = placeholders.map_err(|error| files.locate(error))?;
    let drafts = options.draft_model.as_deref();
    let drafts = drafts
        .map(|path| open_draft(path, &tokenizer))
        .transpose()?;
    let mut on_progress = options.on_progress;
    let model = load(&files, options.dtype, move |progress| {
        if let Some(on_progress) = &mut on_progress {
            on_progress(progress);
        }
    })?;
    let draft = drafts.map(|files| load(&files, options.dtype, |_| {}));
    let draft = draft.transpose()?;
    if let Some(draft) = &draft {
        let (size, expected) = (draft.model.info().vocab_size, model.model.info().vocab_size);
        if size > expected {
            let expected = format!("at most {expected}, as the model has");
            return Err(Error::field(
                "vocab_size of the draft model",
                expected,
                size.to_string(),
            ));
        }
    }
    let mtp = options.mtp.then(|| load_mtp(&files, options.dtype));
    let mtp = mtp.transpose()?;
    let format = OutputFormat::of(&tokenizer, chat_template.as_ref());
    let model_type = model.model.info().model_type.clone();
    let media = MediaEngine::new(&files, &model_type, options.dtype);
    let text = TextParts {
        format,
        vocabulary: OnceLock::new(),
        path: files.path().to_owned(),
        processor: OnceLock::new(),
        tokenizer,
        chat_template,
        eos_ids,
        model_type,
        kinds,
        placeholders,
    };
    Ok(Opened {
        model,
        draft,
        mtp,
        media,
        text,
        device,
    })
}

/// The files of a draft model, which must have the tokens of `tokenizer`.
fn open_draft(path: &Path, tokenizer: &Tokenizer) -> Result<ModelFiles> {
    let files = ModelFiles::open(path)?;
    let other = files.tokenizer()?;
    let count = other.vocab_size().max(tokenizer.vocab_size());
    let differs = |&id: &u32| other.id_to_token(id) != tokenizer.id_to_token(id);
    if let Some(id) = (0..count as u32).find(differs) {
        let name = |tokenizer: &Tokenizer| match tokenizer.id_to_token(id) {
            Some(token) => format!("{token:?}"),
            None => "none".to_owned(),
        };
        let expected = format!("{}, as the model has", name(tokenizer));
        let error = Error::field(
            format!("token {id} of the draft model"),
            expected,
            name(&other),
        );
        return Err(error.with_path(path));
    }
    Ok(files)
}

/// Does jobs until the last session is gone.
fn serve(
    model: &LoadedModel,
    guessers: Guessers<'_>,
    media: &mut MediaEngine,
    text: &Arc<TextParts>,
    pool: &mut PromptCache,
    identity: &dyn Fn() -> Result<String>,
    inbox: &Receiver<Job>,
) {
    for job in inbox {
        match job {
            Job::Generate {
                request,
                events,
                cancelled,
            } => {
                let mut send = |event| events.send(Ok(event)).is_ok();
                let mut sink = Sink {
                    send: &mut send,
                    cancelled: &cancelled,
                };
                let model = &*model.model;
                let run = engine::run(model, guessers, media, text, &request, pool, &mut sink);
                if let Err(error) = run {
                    let _ = events.send(Err(error));
                }
            }
            Job::Score { tokens, top, reply } => {
                let _ = reply.send(score::score(&*model.model, &tokens, top));
            }
            Job::Prompts(job) => {
                prompt_cache::serve(job, &*model.model, media, text, pool, identity);
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Ended,
}

/// The events of a generation, which ends after the last [`Event::Done`] or an error. Dropped, it
/// cancels what is left.
pub struct Generation {
    events: Receiver<Result<Event>>,
    cancelled: Arc<AtomicBool>,
    state: State,
    /// Answers still to end.
    choices: usize,
    /// Keeps the thread until the generation is done with.
    engine: Arc<Engine>,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation")
            .field("state", &self.state)
            .field("info", &self.engine.info)
            .finish_non_exhaustive()
    }
}

/// Cancels a [`Generation`] from another thread.
#[derive(Clone, Debug)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Ends the generation at its next token, or the next block of a tower that sees or hears
    /// for it; it finishes as cancelled, with what there is.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Generation {
    /// A handle by which another thread can end it.
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle(Arc::clone(&self.cancelled))
    }
}

impl Iterator for Generation {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Ended {
            return None;
        }
        let event = self.events.recv().unwrap_or_else(|_| Err(gone()));
        match event {
            Ok(Event::Done(_)) if self.choices > 1 => self.choices -= 1,
            Ok(Event::Done(_)) | Err(_) => self.state = State::Ended,
            _ => {}
        }
        Some(event)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}
