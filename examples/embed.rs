//! An actix-web service with a node in it: it enqueues from a request, answers the outcome, and
//! streams membership events.
//!
//! ```sh
//! cargo run --release --example embed -- worker-1 127.0.0.1:8080 jobs.db
//! cargo run --release --example embed -- worker-2 127.0.0.1:8081 jobs.db 127.0.0.1:PORT_OF_WORKER_1
//! curl -d '{"text":"to be or not to be"}' -H 'content-type: application/json' localhost:8080/words
//! curl -N localhost:8080/events
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use actix_web::rt::signal::unix::{SignalKind, signal};
use actix_web::{App, HttpResponse, HttpServer, Responder, get, post, web};
use futures_util::StreamExt;
use meshwork::prelude::*;
use serde::{Deserialize, Serialize};

/// The arguments of the job: what is counted.
#[derive(Serialize, Deserialize)]
struct CountWords {
    text: String,
}

/// What it returns, and where it ran.
#[derive(Debug, Serialize, Deserialize)]
struct WordCount {
    words: BTreeMap<String, usize>,
    node: String,
}

impl Job for CountWords {
    const NAME: &'static str = "count_words";
    type Output = WordCount;
}

/// What all attempts share.
struct Limits {
    words_max: usize,
}

async fn count_words(
    job: CountWords,
    limits: Data<Limits>,
    cx: JobContext,
) -> Result<WordCount, JobError> {
    let mut found = BTreeMap::new();
    for word in job.text.split_whitespace() {
        *found.entry(word.to_lowercase()).or_default() += 1;
    }
    if found.len() > limits.words_max {
        return Err(JobError::permanent(format!("more than {} words", limits.words_max)));
    }
    Ok(WordCount { words: found, node: cx.node().to_string() })
}

#[post("/words")]
async fn words(mesh: web::Data<Mesh>, job: web::Json<CountWords>) -> HttpResponse {
    let ticket = match mesh.enqueue(Enqueue::new(&*job)).await {
        Ok(ticket) => ticket,
        Err(error) if error.is_retryable() => {
            return HttpResponse::ServiceUnavailable().body(error.to_string());
        }
        Err(error) => return HttpResponse::BadRequest().body(error.to_string()),
    };
    match mesh.outcome(&ticket).await {
        Outcome::Succeeded(count) => HttpResponse::Ok().json(count),
        Outcome::Failed { error, .. } => HttpResponse::UnprocessableEntity().body(error),
        other => HttpResponse::InternalServerError().body(format!("{other:?}")),
    }
}

/// A line of JSON for each membership event; the first is a snapshot.
#[get("/events")]
async fn events(mesh: web::Data<Mesh>) -> HttpResponse {
    let lines = mesh.events().map(|event| {
        let mut line = serde_json::to_vec(&event)?;
        line.push(b'\n');
        Ok::<_, serde_json::Error>(web::Bytes::from(line))
    });
    HttpResponse::Ok().content_type("application/x-ndjson").streaming(lines)
}

#[get("/metrics")]
async fn metrics(mesh: web::Data<Mesh>) -> impl Responder {
    web::Json(mesh.metrics())
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: embed NODE_ID HTTP_ADDR DATABASE [SEED ...]";
    let (Some(id), Some(http), Some(database)) = (args.next(), args.next(), args.next()) else {
        return Err(usage.into());
    };

    // Before HttpServer::new: its factory runs once for each worker thread.
    let mesh = Mesh::builder(&id)
        .store(Store::sqlite(database))
        .seeds(args)
        .data(Limits { words_max: 1_000 })
        .job(count_words)
        .start()
        .await?;

    let shared = web::Data::new(mesh.clone());
    let server = HttpServer::new(move || {
        App::new().app_data(shared.clone()).service(words).service(events).service(metrics)
    })
    .workers(2)
    .shutdown_timeout(1)
    // By itself it would end the System at a signal, and the node with it, in mid-drain.
    .disable_signals()
    .bind(http)?;
    for addr in server.addrs() {
        println!("{id} serves http://{addr}, and gossips at {}", mesh.gossip_addr());
    }
    let server = server.run();
    let handle = server.handle();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    actix_web::rt::spawn(server);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        reason = mesh.stopped() => println!("the node has stopped: {reason}"),
    }
    // HTTP first, so that nothing new comes in; then the node.
    handle.stop(true).await;
    let report = mesh.drain(Duration::from_secs(30)).await;
    println!("{id} is drained: {report:?}");
    Ok(())
}
