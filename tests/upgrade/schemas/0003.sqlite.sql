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
	soak_until DATETIME,
	undo JSON,
	PRIMARY KEY (id),
	UNIQUE ("key")
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
	holdout JSON,
	measured DOUBLE,
	measured_low DOUBLE,
	measured_high DOUBLE,
	PRIMARY KEY (hour, store, namespace, tier)
);
CREATE TABLE prospects (
	id INTEGER NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	seconds DOUBLE NOT NULL,
	requests BIGINT NOT NULL,
	costs JSON NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE reviews (
	id INTEGER NOT NULL,
	decision BIGINT NOT NULL,
	at DATETIME NOT NULL,
	stands VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
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
	expected JSON,
	expected_at DATETIME,
	differs_since DATETIME,
	PRIMARY KEY (name)
);
CREATE INDEX prospects_by_start ON prospects (namespace, start);
CREATE INDEX reviews_by_decision ON reviews (decision, at);
INSERT INTO alembic_version VALUES ('0003');
