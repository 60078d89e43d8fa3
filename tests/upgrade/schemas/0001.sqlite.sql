CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE answers (
	tuner VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	at DATETIME NOT NULL,
	change BOOLEAN NOT NULL,
	reason TEXT NOT NULL,
	PRIMARY KEY (tuner, store, tier, namespace)
);
CREATE TABLE audit (
	id INTEGER NOT NULL,
	at DATETIME NOT NULL,
	who VARCHAR(255) NOT NULL,
	source VARCHAR(255) NOT NULL,
	what VARCHAR(255) NOT NULL,
	detail JSON NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE decisions (
	id INTEGER NOT NULL,
	"key" VARCHAR(255) NOT NULL,
	tuner VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	target VARCHAR(255) NOT NULL,
	models JSON NOT NULL,
	field VARCHAR(255) NOT NULL,
	"from" JSON NOT NULL,
	"to" JSON NOT NULL,
	mode VARCHAR(255) NOT NULL,
	state VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
	expected_version BIGINT,
	applied_version BIGINT,
	policy_revision BIGINT,
	created_at DATETIME NOT NULL,
	updated_at DATETIME NOT NULL,
	approved_at DATETIME,
	approved_by VARCHAR(255) NOT NULL,
	applied_at DATETIME,
	PRIMARY KEY (id),
	UNIQUE ("key")
);
CREATE TABLE freezes (
	id INTEGER NOT NULL,
	reason TEXT NOT NULL,
	who VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	until DATETIME,
	lifted_at DATETIME,
	PRIMARY KEY (id)
);
CREATE TABLE incidents (
	id INTEGER NOT NULL,
	kind VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	message TEXT NOT NULL,
	opened_at DATETIME NOT NULL,
	last_seen DATETIME NOT NULL,
	closed_at DATETIME,
	PRIMARY KEY (id)
);
CREATE TABLE ledger (
	hour DATETIME NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	seconds DOUBLE NOT NULL,
	saved DOUBLE NOT NULL,
	lost DOUBLE NOT NULL,
	bytes BIGINT NOT NULL,
	transferred BIGINT NOT NULL,
	money DOUBLE NOT NULL,
	PRIMARY KEY (hour, store, namespace, tier)
);
CREATE TABLE policy_revisions (
	id INTEGER NOT NULL,
	digest VARCHAR(255) NOT NULL,
	source TEXT NOT NULL,
	text TEXT NOT NULL,
	loaded_at DATETIME NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE stage_windows (
	id INTEGER NOT NULL,
	store VARCHAR(255) NOT NULL,
	stage VARCHAR(255) NOT NULL,
	phase VARCHAR(255) NOT NULL,
	gpu VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	seconds DOUBLE NOT NULL,
	gpu_seconds DOUBLE NOT NULL,
	tokens DOUBLE NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE stores (
	name VARCHAR(255) NOT NULL,
	url VARCHAR(255) NOT NULL,
	boot_id VARCHAR(255) NOT NULL,
	version VARCHAR(255) NOT NULL,
	first_seen DATETIME NOT NULL,
	last_seen DATETIME NOT NULL,
	status JSON NOT NULL,
	tuning JSON NOT NULL,
	totals JSON NOT NULL,
	pending_bypass BOOLEAN,
	PRIMARY KEY (name)
);
CREATE TABLE verdicts (
	id INTEGER NOT NULL,
	decision BIGINT NOT NULL,
	at DATETIME NOT NULL,
	verdict VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE windows (
	id INTEGER NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	model VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	seconds DOUBLE NOT NULL,
	requests BIGINT NOT NULL,
	counters JSON NOT NULL,
	PRIMARY KEY (id)
);
CREATE INDEX decisions_by_target ON decisions (store, tier, namespace, tuner);
CREATE INDEX ix_decisions_state ON decisions (state);
CREATE INDEX incidents_open ON incidents (kind, store, closed_at);
CREATE INDEX stage_windows_by_start ON stage_windows (store, start);
CREATE INDEX ix_verdicts_decision ON verdicts (decision);
CREATE INDEX windows_by_start ON windows (start);
CREATE INDEX windows_by_tier ON windows (store, tier, namespace, start);
INSERT INTO alembic_version VALUES ('0001');
